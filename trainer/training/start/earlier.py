"""What an earlier start of a run, or the run that this one branches off, prescribes for this start."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from data_pipeline.dataset.manifest import Manifest
from trainer.checkpoint.of_run import copy_state, load_whole, weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.config import BranchConfig, Precision, TrainConfig
from trainer.finetuning.initial_weights import InitialRun, check_lora, check_same_initial
from trainer.optim.schedule import cooldown_start
from trainer.runs.layout import LEDGER, METRICS, check_nothing_is_replaced, check_paths
from trainer.runs.lock import locked_unopened
from trainer.runs.record import Origin, Record, check_was_trained, recorded_micro, recorded_precision, write_record
from trainer.runs.saved_run import SavedRun
from trainer.training.start.identity import check_data

BRANCHED = "branched"  # the status of a run that has copied its state, and has not trained yet


def is_new_branch(record: Record) -> bool:
    return record.status == BRANCHED


@dataclass(frozen=True)
class EarlierRun:
    """The run whose state this start continues. Each of its files is read once, under the lock of the start's own run."""

    own: SavedRun  # the run of this start
    saved: SavedRun  # the run that it continues: `branch.run` for a branch that does not exist yet, else its own
    undo: ExitStack  # puts the run folder back at the end of this start, unless its callbacks are removed

    @property
    def continues(self) -> bool:
        """Whether the run has a checkpoint; otherwise no weights exist that depend on its settings."""
        return bool(self.saved.steps)

    def choices(self, config: TrainConfig, manifest: Manifest, initial: InitialRun | None) -> tuple[int | None, Precision | None]:
        """Return the micro-batch and number format that this start uses again. Refuse other data, and check a new `init`."""
        run, record = self.saved.path, self.saved.record_if_any
        if not self.continues:
            check_lora(config)
            if initial is not None:
                initial.check(config, manifest)
        elif record is not None:
            check_data(run, record.identity, manifest.root_digest)
        return recorded_micro(run, record), recorded_precision(run, record) if self.continues else None

    def origin(self, config: TrainConfig, initial: InitialRun | None) -> Origin | None:
        """Return the checkpoint of `init` that a new run begins with, or the recorded one of a run that continues."""
        if not self.continues:
            return None if initial is None else initial.choose(config.init_checkpoint)
        check_same_initial(config, self.saved)
        return self.saved.record.initial


def read_earlier(stack: ExitStack, config: TrainConfig, *, lock: bool) -> EarlierRun:
    """Check the places in the run before it is locked, and that the run which this start continues was trained."""
    check_paths(config.run)
    check_nothing_is_replaced(config.run)
    undo = stack.enter_context(locked_unopened(config.run)) if lock else ExitStack()
    own = SavedRun(config.run)
    exists = own.steps or (own.record_if_any is not None and not is_new_branch(own.record))
    saved = own if config.branch.run is None or exists else SavedRun(config.branch.run)
    check_was_trained(saved.path, saved.record_if_any)
    return EarlierRun(own, saved, undo)


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


def begin_branch(earlier: EarlierRun, branch: BranchConfig, check: Callable[[Path, Record, int], None]) -> SavedRun:
    """On rank 0, which holds the lock of the new run: copy checkpoint, ledger and metrics from `branch.run`, unless the run exists.

    Before anything is written, `check` gets the other run, the record that the branch begins with, and the step. The checkpoint
    comes last: without it, the next start copies again. `open_record` replaces the record, and lists the other run's schedule.
    """
    run, trunk = earlier.own.path, earlier.saved.path
    if earlier.saved is earlier.own:
        return earlier.own
    if trunk.resolve() == run.resolve():
        raise ConfigError(f"{run}: branch.run and run are the same folder; name a new folder for the branch (--run)")
    record, store = earlier.saved.record, CheckpointStore.of(trunk)
    steps = store.steps()  # not `newest_verified`, which would remove a checkpoint that the other run is writing now
    if not steps:
        raise CheckpointError(f"{trunk}: it has no checkpoint, and branch.run needs one; train it up to its first save")
    step = branch.step or steps[-1]
    if step not in steps:
        found = ", ".join(map(str, steps))
        raise CheckpointError(f"{trunk}: no checkpoint of step {step}; its checkpoints: {found}; choose one with branch.step")
    checkpoint, _ = load_whole(store, step)
    kept = [one for one in record.changes if one.step <= step and one.kind != "cooldown"]
    origin = Origin(record=earlier.saved.record_digest, step=step, weights=weights_digest(checkpoint.model))
    begun = record.changed(status=BRANCHED, origin=origin, changes=kept, files={})
    check(trunk, begun, step)
    for name in (METRICS, LEDGER):  # left by a start that was killed
        (run / name).unlink(missing_ok=True)
    write_record(run, begun)
    copy_state(trunk, run, checkpoint)
    return SavedRun(run)
