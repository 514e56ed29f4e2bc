"""What an earlier start of a run, or the run that this one branches off, prescribes for this start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from data_pipeline.dataset.manifest import Manifest
from trainer.checkpoint import CheckpointStore
from trainer.config import Precision, TrainConfig
from trainer.finetuning.initial_weights import check_initial, check_lora, check_same_initial, choose_initial
from trainer.optim.schedule import cooldown_start
from trainer.runs.layout import check_nothing_is_replaced, check_paths
from trainer.runs.record import (
    Origin,
    Record,
    check_was_trained,
    read_record,
    read_record_if_any,
    recorded_micro,
    recorded_precision,
)
from trainer.training.start.identity import check_data

__all__ = ["BRANCHED", "EarlierRun", "allowed_changes", "check_cooldown", "is_new_branch", "read_earlier", "run_exists"]

BRANCHED = "branched"  # the status of a run that has copied its state, and has not trained yet


def _continued_run(config: TrainConfig) -> Path:
    """Return the run whose state this start continues: `branch.run` for a branch that does not exist yet, else the run itself."""
    return config.run if config.branch.run is None or run_exists(config.run) else config.branch.run


def run_exists(run: Path) -> bool:
    """Return whether there is a run, or a complete copy of the state that it begins with."""
    if _has_checkpoints(run):
        return True
    record = read_record_if_any(run)
    return record is not None and not is_new_branch(record)


def is_new_branch(record: Record) -> bool:
    return record.status == BRANCHED


@dataclass(frozen=True)
class EarlierRun:
    """The run whose state this start continues, as it is before the lock is taken."""

    run: Path
    record: Record | None
    continues: bool  # whether it has a checkpoint; otherwise no weights exist that depend on its settings

    def check_data(self, root_digest: str) -> None:
        """Refuse other data before the settings are compared with it."""
        if self.continues and self.record is not None:
            check_data(self.run, self.record.identity, root_digest)

    def choices(self, config: TrainConfig, manifest: Manifest) -> tuple[int | None, Precision | None]:
        """Return its micro-batch and number format, which this start uses again. Compare a new run with `init`."""
        if not self.continues:
            check_lora(config)
            check_initial(config, manifest)
        precision = recorded_precision(self.run, self.record) if self.continues else None
        return recorded_micro(self.run, self.record), precision

    def initial(self, config: TrainConfig) -> Origin | None:
        """Return the checkpoint of `init` that a new run begins with, or the recorded one of a run that continues."""
        if not self.continues:
            return choose_initial(config)
        check_same_initial(config, self.run)
        return (self.record or read_record(self.run)).initial


def read_earlier(config: TrainConfig) -> EarlierRun:
    """Check the places in the run before any file of it is read, and that the run which this start continues was trained."""
    check_paths(config.run)
    check_nothing_is_replaced(config.run)
    run = _continued_run(config)
    record = read_record_if_any(run)
    check_was_trained(run, record)
    return EarlierRun(run, record, _has_checkpoints(run))


def allowed_changes(config: TrainConfig, record: Record | None) -> tuple[str, ...]:
    """Return the names in the identity that may differ from the record: a branch may begin with another schedule."""
    allowed = config.resume.allow_changes
    if record is None or not is_new_branch(record):
        return allowed
    return (*allowed, *(f"schedule.{name}" for name in type(config.schedule).model_fields))


def check_cooldown(config: TrainConfig, record: Record, step: int, decay_steps: int) -> None:
    """Refuse a branch whose cool-down would have begun before its step, so that the learning rate would drop at once."""
    if not is_new_branch(record) or config.schedule.kind != "wsd" or decay_steps == 0:
        return
    start = cooldown_start(config.schedule, decay_steps)
    if start < step:
        raise ConfigError(
            f"{config.run}: its cool-down of steps {start + 1} to {decay_steps} would begin before step {step}, at which the run "
            "branches off; raise limits.steps, lower schedule.cooldown_steps, or choose an earlier branch.step"
        )


def _has_checkpoints(run: Path) -> bool:
    return bool(CheckpointStore.of(run).steps())
