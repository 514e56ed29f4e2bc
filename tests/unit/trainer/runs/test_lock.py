"""What a kill left is removed under the lock of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.runs.lock import locked_run, wait_until_free

_NONCE = "0123456789abcdef"


def _ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _left(run: Path, process: int) -> list[Path]:
    for name in ("objective", "tensorboard"):
        (run / name).mkdir(parents=True, exist_ok=True)
    names = ("config.toml", "report.html", "objective/labels.json", "tensorboard/events.out.tfevents.1")
    files = [(run / name).with_name(f".{Path(name).name}.{process}.{_NONCE}.tmp") for name in names]
    for path in files:
        path.write_bytes(b"half")
    folder = run / f".tokenizer.{process}.{_NONCE}.tmp"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(b"half")
    return [*files, folder]


@pytest.mark.parametrize("waits", [False, True])
def test_unfinished_files_of_a_process_that_has_ended_are_removed_with_the_lock(waits: bool, tmp_path: Path) -> None:
    left, written = _left(tmp_path, _ended()), _left(tmp_path, os.getpid())
    (tmp_path / ".lock").touch()
    (tmp_path / ".mine.tmp").write_bytes(b"of the user")
    if waits:
        wait_until_free(tmp_path, 1)
    else:
        with locked_run(tmp_path):
            pass
    assert not [path for path in left if path.exists()]
    assert [path for path in written if path.exists()] == written, "another process writes them"
    assert (tmp_path / ".mine.tmp").exists()
