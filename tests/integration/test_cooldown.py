"""Cool-downs that branch off another run, and those that begin in time for the end of `limits.minutes`."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError
from common.files import digest_file, sealed
from tests.support.prepared import write_prepared
from tests.support.records import record_of
from tests.support.runs import losses, metrics, tiny_config
from trainer import loop
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.runs.layout import LEDGER
from trainer.runs.ledger import LedgerEvent, read_ledger
from trainer.runs.state import Progress
from trainer.training.saver import Saver
from trainer.verification.verify import verify_run

KEEP_ALL = {"every_steps": 4, "keep_last": 50}
TRUNK: dict[str, Any] = {
    "schedule": {"kind": "constant", "decay_steps": None},
    "limits": {"steps": 12},
    "checkpoint": KEEP_ALL,
    "eval": {"every_steps": 50, "sample_tokens": 0},
}
COOLED: dict[str, Any] = TRUNK | {
    "schedule": {"kind": "wsd", "decay_steps": None, "cooldown_steps": 6, "cooldown_shape": "sqrt", "min_lr_ratio": 0.0},
    "limits": {"steps": 14},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("cooldown") / "data")


@pytest.fixture(scope="module")
def finished_trunk(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trunk") / "trunk"
    train(tiny_config(data, run, **TRUNK))
    return run


@pytest.fixture
def trunk(finished_trunk: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_trunk, tmp_path / "trunk"))


def branch(data: Path, run: Path, trunk: Path, step: int | None = 8, **changes: Any) -> TrainConfig:
    return tiny_config(data, run, **COOLED | {"branch": {"run": trunk, "step": step}} | changes)


def test_a_cooldown_off_a_trunk_has_the_bits_of_a_run_that_was_planned_with_it(data: Path, trunk: Path, tmp_path: Path) -> None:
    whole = train(tiny_config(data, tmp_path / "whole", **COOLED))
    assert train(branch(data, tmp_path / "cooled", trunk)) == whole
    assert losses(tmp_path / "cooled") == losses(tmp_path / "whole")
    assert metrics(tmp_path / "cooled", "train")[-1]["lr"] < metrics(tmp_path / "cooled", "train")[8]["lr"]


def test_a_branch_names_its_origin_and_is_verified_with_the_steps_of_its_trunk(data: Path, trunk: Path, tmp_path: Path) -> None:
    run = tmp_path / "cooled"
    digest = train(branch(data, run, trunk))
    record = record_of(run)
    assert record["origin"]["step"] == 8
    assert record["origin"]["record"] == digest_file(trunk / "record.json")
    assert record["earlier"][0]["until"] == 8
    assert record["earlier"][0]["was"]["schedule.kind"] == "constant"
    outcomes = {one.level: one for one in verify_run(run, train=train, num_steps=6, start=8)}
    assert outcomes["integrity"].facts["ledger_lines"] >= 14
    assert "branches off another run at step 8" in outcomes["integrity"].text
    assert "bitwise equal: 6 steps (9 to 14)" in outcomes["replay"].text
    assert train(tiny_config(data, run, **COOLED)) == digest  # a resume needs no --branch
    assert record_of(run)["origin"] == record["origin"]


def test_a_branch_whose_first_weights_were_exchanged_is_found(data: Path, trunk: Path, tmp_path: Path) -> None:
    run = tmp_path / "cooled"
    train(branch(data, run, trunk))
    record = record_of(run)
    record["origin"]["weights"] = "sha256:" + "0" * 64
    (run / "record.json").write_bytes(sealed(record))
    with pytest.raises(CheckpointError, match="step 8 are not those of the run that it branches off"):
        list(verify_run(run, train=train, level="integrity"))


def test_a_branch_that_was_killed_while_it_copied_begins_again(
    data: Path, trunk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = branch(data, tmp_path / "cooled", trunk)

    def killed(self: CheckpointStore, checkpoint: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert train(config) == train(branch(data, tmp_path / "other", trunk))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"branch": {"step": 7}}, CheckpointError, "no checkpoint of step 7; its checkpoints: 4, 8, 12"),
        ({"branch": {"step": None}}, ConfigError, "cool-down of steps 9 to 14 would begin before step 12"),
        ({"optim": {"lr": 1e-3}}, ConfigError, "optim.lr was 0.003 and is 0.001"),
    ],
)
def test_a_branch_that_cannot_continue_its_trunk_is_refused(
    data: Path, trunk: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    place = {"branch": {"run": trunk, "step": 8} | changes.pop("branch", {})}
    with pytest.raises(error, match=message):
        train(tiny_config(data, tmp_path / "cooled", **COOLED | place | changes))
    assert not list((tmp_path / "cooled").glob("record.json"))
    assert not list((tmp_path / "cooled").glob("checkpoints/*"))


def test_a_branch_takes_automatic_settings_from_its_trunk(data: Path, tmp_path: Path) -> None:
    trunk, own = tmp_path / "trunk", {"precision": "bf16", "batch": {"micro_batch_size": 2}}
    train(tiny_config(data, trunk, **TRUNK | own))
    automatic: dict[str, Any] = {"precision": "auto", "batch": {"micro_batch_size": "auto"}}  # would give fp32, and 8 rows
    assert train(branch(data, tmp_path / "cooled", trunk, **automatic)) == train(
        tiny_config(data, tmp_path / "whole", **COOLED | own)
    )


def test_a_branch_changes_nothing_in_a_trunk_that_saves_meanwhile(data: Path, trunk: Path, tmp_path: Path) -> None:
    unfinished = trunk / "checkpoints" / ".step-00000013.tmp"
    unfinished.mkdir()
    train(branch(data, tmp_path / "cooled", trunk, step=None, limits={"steps": 20}))
    assert record_of(tmp_path / "cooled")["origin"]["step"] == 12
    assert unfinished.is_dir()


def test_a_trunk_without_a_checkpoint_is_refused(data: Path, trunk: Path, tmp_path: Path) -> None:
    shutil.rmtree(trunk / "checkpoints")
    with pytest.raises(CheckpointError, match=r"trunk: it has no checkpoint, and branch\.run needs one"):
        train(branch(data, tmp_path / "cooled", trunk, step=None))


def a_minute_each(patch: pytest.MonkeyPatch) -> list[float]:
    """Let each step take a minute of the clock, and each save half a minute. Return the clock's seconds."""
    now, step, save = [0.0], vars(loop)["train_step"], Saver.save

    def stepping(*arguments: Any, **settings: Any) -> Any:
        now[0] += 60.0
        return step(*arguments, **settings)

    def saving(self: Saver, progress: Progress) -> Progress:
        now[0] += 30.0
        return save(self, progress)

    patch.setattr(loop, "train_step", stepping)
    patch.setattr(Saver, "save", saving)
    patch.setattr("trainer.runs.clock.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


TIMED: dict[str, Any] = TRUNK | {
    "schedule": {"kind": "wsd", "decay_steps": None, "decay_share": 0.25, "min_lr_ratio": 0.0},
    "limits": {"steps": None, "minutes": 24.0},
}


def test_a_run_that_time_alone_limits_cools_down_in_time_and_is_replayed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, tmp_path / "timed", **TIMED)
    with monkeypatch.context() as patch:
        now = a_minute_each(patch)
        digest = train(config)
    assert 20 * 60 < now[0] <= 24 * 60
    (change,) = record_of(config.run)["changes"]
    first, end = change["step"], change["cooldown_end"]
    assert digest.endswith(f"steps {end}")
    assert 18 <= end <= 24
    assert record_of(config.run)["ended_by"] == "limits.minutes"
    rates = [event["lr"] for event in metrics(config.run, "train")]
    assert rates[3:first] == [3e-3] * (first - 3)
    assert rates[first:] == pytest.approx([3e-3 * (end - step) / (end - first + 1) for step in range(first, end)])
    events = [entry for entry in read_ledger(config.run / LEDGER) if isinstance(entry, LedgerEvent) and entry.event == "cooldown"]
    assert [(entry.head.step, entry.model_dump()["end"]) for entry in events] == [(first - 1, end)]
    (outcome,) = [one for one in verify_run(config.run, train=train, num_steps=end, start=0) if one.level == "replay"]
    assert f"bitwise equal: {end} steps" in outcome.text
    assert train(config) == digest  # it stays ended


def test_a_cooldown_follows_the_speed_without_a_jump_of_the_learning_rate_and_is_replayed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = {"kind": "wsd", "decay_steps": None, "decay_share": 0.5, "min_lr_ratio": 0.0}
    limits, checkpoint = {"steps": None, "minutes": 40.0}, {"every_steps": 50}
    config = tiny_config(data, tmp_path / "timed", **TIMED | {"schedule": schedule, "limits": limits, "checkpoint": checkpoint})
    with monkeypatch.context() as patch:
        now = a_minute_each(patch)
        step = vars(loop)["train_step"]

        def faster(*arguments: Any, **settings: Any) -> Any:  # ten times, shortly after the cool-down has begun
            result = step(*arguments, **settings)
            now[0] -= 54.0 if arguments[2].step > 24 else 0.0
            return result

        patch.setattr(loop, "train_step", faster)
        digest = train(config)
    assert 36 * 60 < now[0] <= 40 * 60
    changes = record_of(config.run)["changes"]
    rates = [event["lr"] for event in metrics(config.run, "train")]
    first, end = changes[0]["step"], changes[-1]["cooldown_end"]
    assert 2 <= len(changes) < 10
    assert end > 2 * changes[0]["cooldown_end"]
    assert digest.endswith(f"steps {end}")
    falls = [before - after for before, after in zip(rates[first - 1 :], rates[first:], strict=False)]
    assert min(falls) > 0
    assert max(falls) <= 1.01 * 3e-3 / (changes[0]["cooldown_end"] - first + 1)  # no step falls more than one of the first plan
    assert rates[-1] < 3e-3 / 20
    (outcome,) = [one for one in verify_run(config.run, train=train, num_steps=40, start=0) if one.level == "replay"]
    assert "bitwise equal: 40 steps" in outcome.text
    assert train(config) == digest


def test_a_resume_before_a_timed_cooldown_repeats_it_whatever_the_clock_says(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data, tmp_path / "timed", **TIMED)
    with monkeypatch.context() as patch:
        a_minute_each(patch)
        digest = train(config)
    before, store = losses(config.run), CheckpointStore(config.run / "checkpoints")
    for step in store.steps():
        if step > 8:
            shutil.rmtree(store.path(step))
    assert train(config) == digest  # with the clock of this machine, on which almost no time passes
    assert losses(config.run) == before


def test_time_brings_a_planned_cooldown_forward_and_changes_nothing_if_it_suffices(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {"limits": {"steps": 16, "minutes": 1000.0}}
    with monkeypatch.context() as patch:
        a_minute_each(patch)
        enough = train(tiny_config(data, tmp_path / "enough", **TIMED | steps))
        train(tiny_config(data, tmp_path / "short", **TIMED | {"limits": {"steps": 100, "minutes": 20.0}}))
    assert enough == train(tiny_config(data, tmp_path / "untimed", **TIMED | {"limits": {"steps": 16}}))
    assert record_of(tmp_path / "enough")["changes"] == []
    assert metrics(tmp_path / "short", "train")[-1]["lr"] < 3e-3 / 2


@pytest.mark.parametrize("kind", ["constant", "step"])
def test_time_alone_may_limit_a_schedule_that_needs_no_length(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    now = a_minute_each(monkeypatch)
    schedule = {"kind": kind, "decay_steps": None, "milestones": (4,)}
    train(tiny_config(data, tmp_path / "run", **TIMED | {"schedule": schedule, "limits": {"steps": None, "minutes": 8.0}}))
    assert record_of(tmp_path / "run")["ended_by"] == "limits.minutes"
    assert 6 * 60 < now[0] <= 8 * 60  # with the saves


def test_a_run_that_was_recorded_before_these_settings_resumes(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run", limits={"steps": 6})
    train(config)
    record = record_of(config.run)
    for name in (
        "schedule.cooldown_shape",
        "schedule.weight_decay",
        "schedule.cooldown_steps",
        "optim.muon_lr",
        "model.base_width",
    ):
        del record["identity"][name]
    (config.run / "record.json").write_bytes(sealed(record))
    longer = tiny_config(data, tmp_path / "run")
    assert train(longer) == train(tiny_config(data, tmp_path / "whole"))
    assert record_of(config.run)["earlier"] == []
