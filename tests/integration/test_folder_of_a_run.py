"""A training whose folder is deleted, holds other files, is read-only, or is on a full disk: one error line, and the exit code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ExitCode, ProjectError
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, arguments, tiny_config, wait_for_step
from tests.support.two_ranks import log, started
from trainer.loop import train

TRAIN = f"{ROOT}/entrypoints/train"
LONG: dict[str, Any] = {"limits": {"steps": 100_000}, "schedule": {"decay_steps": 100_000}}
MOUNT = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
"""Runs a script in which the folder `disk` can be mounted, as an ordinary user."""


def errors(text: str) -> list[str]:
    """Return the error and warning lines, and those of tracebacks."""
    return [line for line in text.splitlines() if line.startswith(("error", "warning", "WARNING", "Traceback", "  File"))]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_folder_that_is_moved_away_is_one_line_for_all_ranks(tmp_path: Path, num_ranks: int) -> None:
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run", **LONG)
    with started(config, CPU_RANKS=str(num_ranks)) as training:
        wait_for_step(config.run, 6)
        config.run.rename(tmp_path / "elsewhere")
        assert training.wait(120) == ExitCode.STORAGE
    [line] = errors(log(config))
    assert line.startswith(f"error: run = {config.run}: the folder was deleted or moved during the training, ")
    assert f"continue with `trainer train --run {config.run}`" in line
    assert not config.run.exists()


@pytest.mark.parametrize("name", ["config.toml", "extension.py", "report.html", "metrics.jsonl", "tokenizer/mine", "record.json"])
def test_a_new_run_replaces_no_file_of_somebody_else(tmp_path: Path, name: str) -> None:
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "mine")
    path = config.run / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    for _ in range(2):
        with pytest.raises(ProjectError, match=re.escape(name)) as caught:
            train(config)
        assert caught.value.exit_code in {ExitCode.CONFIG, ExitCode.CHECKPOINT}
        assert path.read_text() == "precious"


def test_a_folder_with_other_files_can_hold_a_new_run_and_a_first_start_that_failed_does_not_block_it(tmp_path: Path) -> None:
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "run")
    config.run.mkdir()
    (config.run / "train.log").write_text("precious")
    train(config)
    for path in (config.run / "record.json", *config.run.glob("checkpoints/*")):  # as a start that ends before its first save
        path.unlink() if path.is_file() else shutil.rmtree(path)
    train(config)
    assert (config.run / "train.log").read_text() == "precious"


def on_a_disk(tmp_path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder with prepared data, settings in $SETTINGS, and an empty folder `disk` to mount something on."""
    if subprocess.run([*MOUNT, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let its users mount a file system of their own")
    (tmp_path / "disk").mkdir()
    config = tiny_config(write_prepared(tmp_path / "data"), tmp_path / "disk/run", **LONG)
    variables = {"PYTHON": sys.executable, "CPU_RANKS": "2", "OMP_NUM_THREADS": "1", "TRAIN_RESTART_DELAY_S": "0"}
    text = f"set -e; cd {shlex.quote(str(tmp_path))}; train='{TRAIN} {shlex.join(arguments(config))}'; {script}"
    return subprocess.run(
        [*MOUNT, text], env=os.environ | variables, capture_output=True, text=True, timeout=180, check=False, cwd=tmp_path
    )


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path: Path) -> None:
    done = on_a_disk(tmp_path, "mount -t tmpfs -o ro tmpfs disk; $train")
    assert done.returncode == ExitCode.STORAGE, done.stderr
    [line] = errors(done.stderr)
    assert line.startswith(f"error: {tmp_path}/disk")
    assert "is mounted read-only; name a folder that can be written to" in line


def test_a_disk_that_fills_up_is_one_line_with_the_path_and_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    fill = "(until [ -e disk/run/checkpoints/step-00000005 ]; do sleep 0.1; done; cat /dev/zero >disk/filler 2>/dev/null) &"
    done = on_a_disk(
        tmp_path, f"mount -t tmpfs -o size=8m tmpfs disk; {fill} code=0; $train || code=$?; ls disk/run/checkpoints; exit $code"
    )
    assert done.returncode == ExitCode.STORAGE, done.stderr
    [line] = errors(done.stderr)
    assert line.startswith(f"error: {tmp_path}/disk/run"), done.stderr
    assert "cannot write" not in done.stderr
    assert "no space left" in line
    assert "make room" in line
    assert "step-00000005" in done.stdout
