"""Compares a planned run with the files of an earlier start."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ProjectError
from common.files import UnusableFileError
from trainer.checkpoint.of_run import load_whole, weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.group import check_shared
from trainer.launch.finished import is_same, nothing_to_train
from trainer.planning.checkpoints import check_space, checkpoint_bytes, frozen_bytes
from trainer.runs.adjustments import Adjustments
from trainer.runs.record import Origin, Record, check_nothing_saved
from trainer.runs.saved_run import SavedRun
from trainer.runs.state import RunState
from trainer.training.start.identity import check_identity, identity_of, recorded_adjustments
from trainer.training.start.plan import StartPlan, allowed_changes, begin_branch, check_cooldown
from trainer.watchdog.heartbeat import remove_heartbeats


class NothingToTrain(Exception):  # noqa: N818 - an outcome, no error
    """The run has reached a limit, so this start trains no step and changes no file. The message, on rank 0, says so."""

    def __init__(self, message: str, result: str) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Continued:
    """What this start continues. The files of the run are not changed yet."""

    identity: Mapping[str, Any]
    initial: Origin | None  # the checkpoint of another run whose weights the run began or begins with, None if there is none
    checkpoints: CheckpointStore
    before: SavedRun | None  # the run as the start before left it, None if there was none. None on all ranks except rank 0.
    newest: int | None  # step of the newest checkpoint, None if there is none
    adjustments: Adjustments  # adjustments of earlier starts


def check(plan: StartPlan) -> Continued:
    """Compare the plan with the locked run. Raises NothingToTrain if a limit is reached already."""
    config, manifest, group = plan.context.config, plan.context.manifest, plan.context.group
    decay_steps = plan.criteria.decay_steps
    initial = group.on_main(lambda: plan.earlier[0].origin(config, plan.initial))
    identity = identity_of(
        plan.context,
        decay_steps=decay_steps,
        extension=plan.extension.digests,
        digests=plan.task.digests | ({} if initial is None else {"init": initial.weights}),
    )
    checkpoints = CheckpointStore.of(config.run)
    before: list[SavedRun] = []

    def check_branch(trunk: Path, record: Record, step: int) -> None:
        check_identity(trunk, record.identity, identity, allowed_changes(config, record))
        check_cooldown(config, record, step, decay_steps)

    def prepare_run() -> tuple[int | None, list[dict[str, Any]], tuple[str, str] | None]:
        saved = begin_branch(plan.earlier[0], config.branch, check_branch)
        newest, record = checkpoints.newest_verified(), saved.record_if_any
        if newest is None:
            check_nothing_saved(config.run, record)
        else:
            record = saved.record
            check_identity(config.run, record.identity, identity, allowed_changes(config, record))
        adjustments = recorded_adjustments(config.run, record, identity, allowed_changes(config, record))
        if record is not None and newest is not None:
            check_cooldown(config, record, newest, decay_steps)
            before.append(saved)
            progress = RunState.of_manifest(checkpoints.manifest_path(newest), checkpoints.state(newest)).progress
            cooldown = adjustments.cooldown(newest)
            ended_by = plan.criteria.ended_by(progress, None if cooldown is None else cooldown.cooldown_end)
            if ended_by is not None:
                known = None
                with suppress(OSError, ProjectError, UnusableFileError):
                    known = saved.config.model_copy(update={"run": saved.path})
                # A start that was killed after its last step has to complete the record.
                if record.status == "finished" or known is None or not is_same(config, known):
                    digest = record.weights if record.step == progress.step else None
                    digest = digest or weights_digest(load_whole(checkpoints, progress.step)[0].model)
                    lines = nothing_to_train(known or config, record.status, progress.step, ended_by)
                    return newest, [], ("\n".join(lines), f"weights {digest} steps {progress.step}")
        sizes = checkpoint_bytes(config, manifest.vocab_size), frozen_bytes(config, manifest.vocab_size)
        check_space(checkpoints.directory, *sizes)
        remove_heartbeats(config.run)
        return newest, adjustments.to_json(), None

    newest, recorded, nothing_left = group.on_main(prepare_run)
    if nothing_left is not None:
        message, result = nothing_left
        raise NothingToTrain(message if group.is_main else "", result)
    check_shared(config.run, group)
    adjustments = Adjustments.from_json(recorded)
    return Continued(identity, initial, checkpoints, before[0] if before else None, newest, adjustments)
