"""`plan` measures a few steps of a training on one rank and leaves no trace."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from common.errors import ConfigError, PreparedDataError
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.commands import plan
from trainer.training import dry_run as module
from trainer.training.dry_run import dry_run


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CPU_RANKS", "OMP_NUM_THREADS", "PET_NNODES", "PET_NPROC_PER_NODE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


def test_five_steps_are_measured_and_nothing_is_written(data: Path, tmp_path: Path) -> None:
    config, clock = tiny_config(data, tmp_path / "run"), count()
    found = dry_run(config, lambda: next(clock))
    assert found.step_s == 1.0  # the clock is read at the beginning and at the end of each step
    assert (found.device, found.num_ranks) == ("cpu", 1)
    assert found.forecast.num_steps == 12
    assert found.forecast.num_weights > 0
    assert list(tmp_path.iterdir()) == []


def test_a_step_of_many_micro_batches_is_measured_in_part(data: Path, tmp_path: Path) -> None:
    config, clock = tiny_config(data, tmp_path / "run", batch={"global_batch_size": 32, "micro_batch_size": 2}), count()
    assert dry_run(config, lambda: next(clock)).step_s == 4.0  # 16 micro-batches, of which 4 are measured


def test_a_slow_step_is_measured_once(data: Path, tmp_path: Path) -> None:
    reads = count()
    assert dry_run(tiny_config(data, tmp_path / "run"), lambda: 50.0 * next(reads)).step_s == 50.0
    assert next(reads) == 6, "the beginning, an unmeasured step, a measured step, and the check of the time"


def test_the_ranks_are_those_of_the_launcher(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPU_RANKS", "2")
    config, clock = (
        tiny_config(data, tmp_path / "run", batch={"global_batch_size": 32, "micro_batch_size": 2}, threads=None),
        count(),
    )
    found = dry_run(config, lambda: next(clock))
    assert (found.num_ranks, found.step_s) == (2, 2.0)
    monkeypatch.setenv("CPU_RANKS", "8")
    with pytest.raises(ConfigError, match="too few for 8 ranks"):
        dry_run(tiny_config(data, tmp_path / "run"))


def test_a_step_without_memory_is_reported(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(module, "build", without_memory)
    found = dry_run(tiny_config(data, tmp_path / "run"))
    assert found.step_s is None
    assert found.forecast.num_weights > 0


def test_plan_refuses_what_train_refuses(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PreparedDataError):
        dry_run(tiny_config(tmp_path / "nothing", tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"raise model\.context"):
        dry_run(tiny_config(data, tmp_path / "run", model={"context": 16}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it without torchrun"):
        dry_run(tiny_config(data, tmp_path / "run"))


def test_the_command_prints_the_plan(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.run(tiny_config(data, tmp_path / "run"))
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == ["data", "tokenizer", "model", "runs", "batch", "length", "evaluation", "memory", "disk", "time"]
    assert len(lines) <= 24
