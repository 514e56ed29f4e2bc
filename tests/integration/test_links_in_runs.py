"""Links, pipes and the like at places of a run folder that the program writes. They are refused or replaced, never followed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from common.errors import CheckpointError, PreparedDataError, StorageError
from tests.support.prepared import write_prepared
from tests.support.runs import losses, tiny_config
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.metrics.sinks.json_lines import NodeHardwareSink
from trainer.metrics.sinks.wandb_sink import remembered_id
from trainer.report.write import write_report
from trainer.runs.metrics_file import CutOff

FOLDERS = (
    "heartbeat",
    "stacks",
    "tensorboard",
    "ledger",
    "checkpoints",
    "checkpoints/objects",
    "tokenizer",
    "extension",
    "extension/parts",
    ".tokenizer.tmp",
    "wandb",
)
REPLACED = ("record.json", "config.toml", "extension.py", "report.html", "training_metrics.png")
CONTINUED = (".lock", "metrics.jsonl", "ledger/steps.jsonl", "heartbeat/rank-0", "stacks/rank-0.txt")
"""Files that stay open. Later output goes to the same file."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def begun(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that can be resumed."""
    run = tmp_path_factory.mktemp("runs") / "begun"
    train(configuration(data, run, 2))
    return run


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder outside of the run, which must not change."""
    victim = tmp_path / "elsewhere"
    names = [
        "file",
        "rank-0",
        "rank-7",
        "rank-0.txt",
        "steps.jsonl",
        "manifest.json",
        ".0.tmp",
        "objects/.0.tmp",
        "step-00000001/a",
    ]
    for name in names:
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text("precious")
    before = contents(victim)
    yield victim
    assert contents(victim) == before


def configuration(data: Path, run: Path, steps: int) -> TrainConfig:
    return tiny_config(
        data,
        run,
        limits={"steps": steps},
        schedule={"decay_steps": 9},
        eval={"every_steps": 9, "sample_tokens": 0},
        watchdog={"enabled": "on"},
        log={"report": True},
    )


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def train_or_be_refused(config: TrainConfig, name: str) -> None:
    """Train, or fail with a message that names the file in the way."""
    try:
        train(config)
    except (CheckpointError, StorageError, OSError) as error:
        assert str(config.run / name) in str(error)  # noqa: PT017 - being refused is one of two good outcomes
    else:
        assert losses(config.run)[-1][0] == config.limits.steps


def in_the_way(run: Path, name: str, victim: Path, kind: str) -> Path:
    path = run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link to a folder":
        path.symlink_to(victim)
    elif kind == "link to a file":
        path.symlink_to(victim / "file")
    elif kind == "link to nothing":
        path.symlink_to(victim / "new")
    elif kind == "second name":
        path.hardlink_to(victim / "file")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    return path


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["new run", "resumed run"])
def test_no_folder_of_a_run_is_reached_through_a_link(
    data: Path, begun: Path, tmp_path: Path, victim: Path, name: str, fresh: bool
) -> None:
    run = tmp_path / "run" if fresh else shutil.copytree(begun, tmp_path / "run")
    path = in_the_way(run, name, victim, "link to a folder")
    if name == ".tokenizer.tmp":
        train_or_be_refused(configuration(data, run, 3), name)
        return
    with pytest.raises(CheckpointError, match="symbolic link") as caught:
        train(configuration(data, run, 3))
    assert str(path) in str(caught.value)
    assert path.is_symlink(), "the link was removed"


@pytest.mark.parametrize("name", [*CONTINUED, *REPLACED])
@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "second name", "pipe", "directory"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new run", "resumed run"])
def test_no_file_of_a_run_is_written_anywhere_else(
    data: Path, begun: Path, tmp_path: Path, victim: Path, name: str, kind: str, fresh: bool
) -> None:
    run = tmp_path / "run" if fresh else shutil.copytree(begun, tmp_path / "run")
    if fresh:  # what is left by a start that was killed; without it a new run would refuse the file as that of somebody else
        run.mkdir()
        (run / ".lock").touch()
    in_the_way(run, name, victim, kind)
    train_or_be_refused(configuration(data, run, 3), name)


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "second name", "pipe", "directory"])
def test_readings_of_another_machine_are_not_written_anywhere_else(tmp_path: Path, victim: Path, kind: str) -> None:
    path = in_the_way(tmp_path / "run", "hardware-rank-8.jsonl", victim, kind)
    for known in (None, CutOff(3)):
        try:
            NodeHardwareSink(path, known).close()
        except (CheckpointError, StorageError) as error:
            assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "pipe", "directory", "other text"])
def test_the_id_of_a_tracking_service_is_read_from_a_file_of_the_run_alone(tmp_path: Path, victim: Path, kind: str) -> None:
    path = in_the_way(tmp_path / "run", ".wandb-id", victim, kind)
    if kind == "other text":
        path.write_text("../../someone/else")
    with pytest.raises(CheckpointError) as caught:
        remembered_id(path)
    assert str(path) in str(caught.value)
    assert "precious" not in str(caught.value)


def test_a_report_replaces_a_link_and_nobody_can_foretell_its_temporary_name(
    begun: Path, tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(begun, tmp_path / "run")
    written: list[Path] = []

    def replacing(path: Path, target: Path) -> Path:
        written.append(Path(path))
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", replacing)
    for name in ("report.html", "training_metrics.png"):
        in_the_way(run, name, victim, "link to a file")
        in_the_way(run, f".{name}.{os.getpid()}.tmp", victim, "link to a file")
    write_report(run)
    write_report(run)
    assert len(set(written)) == 4
    assert not (run / "report.html").is_symlink()


def test_a_store_saves_nothing_through_a_link(tmp_path: Path, victim: Path, begun: Path) -> None:
    checkpoint = CheckpointStore(begun / "checkpoints").load(2)
    for place in ("checkpoints", "other/objects"):
        path = in_the_way(tmp_path, place, victim, "link to a folder")
        store = CheckpointStore(path if place == "checkpoints" else path.parent)
        for change in (partial(store.save, checkpoint), store.newest_verified, store.collect_trash, partial(store.retain, [])):
            try:
                change()
            except CheckpointError as error:
                assert str(path) in str(error)  # noqa: PT017
        with pytest.raises(CheckpointError):
            store.save(checkpoint)


def test_a_link_in_the_tokenizer_of_the_data_puts_nothing_into_the_run(data: Path, tmp_path: Path, victim: Path) -> None:
    copied = shutil.copytree(data, tmp_path / "data")
    (copied / "tokenizer/more").symlink_to(victim / "file")
    with pytest.raises((PreparedDataError, CheckpointError), match="tokenizer/more"):
        train(configuration(copied, tmp_path / "run", 2))
    assert not list((tmp_path / "run").glob("*tokenizer*/more"))


def test_a_run_may_be_reached_through_a_link(data: Path, tmp_path: Path) -> None:
    (tmp_path / "disk/runs").mkdir(parents=True)
    (tmp_path / "runs").symlink_to("disk/runs")
    train(configuration(data, tmp_path / "runs/one", 2))
    train(configuration(data, tmp_path / "runs/one", 3))
    assert len(losses(tmp_path / "disk/runs/one")) == 3
