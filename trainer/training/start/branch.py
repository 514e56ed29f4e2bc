"""Begins a run with a checkpoint of another run: for example several cool-downs off one trunk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.of_run import copy_state, load_whole
from trainer.checkpoint.weights import weights_digest
from trainer.config import BranchConfig
from trainer.runs.layout import LEDGER, METRICS
from trainer.runs.record import Origin, Record, write_record
from trainer.runs.saved_run import SavedRun
from trainer.training.start.earlier import BRANCHED, EarlierRun

_log = logging.getLogger(__name__)


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
    _log.info("branched off %s at step %d", trunk, step)
    return SavedRun(run)
