"""Compares the settings of a run with its data, the machine and the files of an earlier start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreparedDataError, ProjectError
from common.files import UnusableFileError
from common.storage_errors import naming
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint import CheckpointStore, check_space
from trainer.checkpoint.weights import weights_digest
from trainer.config import Precision, TrainConfig
from trainer.data.adjustments import Adjustments
from trainer.data.mixture import build_order
from trainer.distributed.group import Group
from trainer.distributed.shared_folders import check_same_data, check_shared
from trainer.extensions.hooks import Extension
from trainer.finetuning.choice import make_task
from trainer.finetuning.initial_weights import check_initial, check_same_initial, choose_initial
from trainer.finetuning.lora import check_lora
from trainer.finetuning.task import Task
from trainer.launch.finished import is_same, nothing_to_train, recorded_settings
from trainer.machine.memory import PeakMeter
from trainer.machine.precision import ChosenPrecision, with_precision
from trainer.model.attention import backend_of
from trainer.optim.optimizers import check_optimizer
from trainer.parallel.fsdp import check_parallel
from trainer.planning.checkpoints import checkpoint_bytes, frozen_bytes
from trainer.runs.clock import Clock
from trainer.runs.context import RunContext
from trainer.runs.directory import check_nothing_is_replaced, check_places, locked_unopened
from trainer.runs.limits import Plan, plan_run, with_shorter_warmup
from trainer.runs.progress import Progress
from trainer.runs.record import (
    Before,
    Origin,
    Record,
    check_data,
    check_identity,
    check_nothing_saved,
    check_was_trained,
    identity_of,
    read_record,
    read_record_if_any,
    recorded_adjustments,
    recorded_micro,
    recorded_precision,
)
from trainer.runs.state import load_whole, read_progress
from trainer.training.branch import allowed_changes, begin_branch, check_cooldown, continued_run
from trainer.training.micro_batch_size import with_micro, with_micro_for
from trainer.training.trainable import RunData
from trainer.watchdog.files import clear_heartbeats

__all__ = ["Checked", "Fitted", "NothingToTrain", "check", "check_ranks", "fit"]

_log = logging.getLogger(__name__)


class NothingToTrain(Exception):  # noqa: N818 - an outcome, no error
    """The run has reached a limit, so this start trains no step and changes no file. The message says so.

    Args:
        message: for users; empty on all ranks except rank 0.
        result: of `trainer.loop.train`.
    """

    def __init__(self, message: str, result: str) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class Fitted:
    """A run whose settings fit the data and the machine. No file was changed."""

    context: RunContext
    precision: ChosenPrecision
    objective: Task
    data: RunData
    limits: Plan
    memory: PeakMeter


@dataclass(frozen=True)
class Checked:
    """A run whose settings fit the data, the machine and the files of an earlier start. These files are not changed yet."""

    context: RunContext
    precision: ChosenPrecision
    extension: Extension
    objective: Task
    data: RunData
    limits: Plan
    identity: Mapping[str, Any]
    initial: Origin | None
    """The checkpoint of another run whose weights the run began or begins with, None if there is none."""
    checkpoints: CheckpointStore
    before: Before | None
    """The previous start of the run, None if there is none. None on all ranks except rank 0."""
    newest: int | None
    """Step of the newest checkpoint, None if there is none."""
    adjustments: Adjustments
    """Adjustments of earlier starts."""
    memory: PeakMeter
    clock: Clock
    undo: ExitStack
    """Puts the run folder back at the end of this start, unless its callbacks are removed."""


def fit(stack: ExitStack, config: TrainConfig, group: Group, extension: Extension) -> Fitted:
    """Compare the settings with the data and the machine, and choose those that are `auto`. Raises the errors of `opened_run`."""
    if config.run.resolve() == config.data.resolve():  # both have a report.html, a tokenizer and a lock
        raise ConfigError(f"{config.run}: run and data are the same folder; name another folder for the run (--run)")
    stack.enter_context(naming(config.run))  # a file that cannot be written from here on is a file of the run
    group.on_main(lambda: _check_continued(config))
    manifest, tokenizer = group.on_all(lambda: _open_data(stack, config, group))
    check_same_data(config.data, manifest.root_digest, group)
    group.on_main(lambda: _check_data(config, manifest))
    objective = group.on_all(lambda: make_task(config, manifest, extension.hooks))
    train_rows = objective.rows(config.data, manifest, "train", verify=config.verify_data)
    val_rows = objective.rows(config.data, manifest, "val", verify=config.verify_data)
    recorded_rows, recorded_format = group.on_main(lambda: _first_look(config, manifest))
    config, precision = with_precision(config, group, recorded_format)
    backend = backend_of(config, group.device)
    memory = PeakMeter(group.device)
    config = with_micro_for(config, group.world_size)
    context = RunContext(config, manifest, group, backend, extension.has_step or objective.step is not None)
    context = with_micro(context, extension, recorded_rows, objective)
    _check_fit(context.config, manifest, len(train_rows), len(val_rows), group)
    check_parallel(context.config, group)
    check_optimizer(context.config)
    config = with_shorter_warmup(context.config, manifest, len(train_rows))
    context = replace(context, config=config)
    order = build_order(config.seed, train_rows, manifest.sources, config.mixture.weights)
    limits = plan_run(config, manifest, len(train_rows))
    return Fitted(context, precision, objective, RunData(context, train_rows, val_rows, order, tokenizer), limits, memory)


def check(stack: ExitStack, config: TrainConfig, group: Group, extension: Extension, clock: Clock) -> Checked:
    """Compare the settings with the data, the machine and the existing run. Raises the errors of `setup.opened_run`.

    Raises:
        NothingToTrain: a limit is reached already.
    """
    fitted = fit(stack, config, group, extension)
    context, limits = fitted.context, fitted.limits
    config, manifest = context.config, context.manifest
    initial = group.on_main(lambda: _initial(config))
    identity = identity_of(
        context,
        decay_steps=limits.decay_steps,
        extension_digest=extension.digest,
        digests=fitted.objective.digests | ({} if initial is None else {"init": initial.weights}),
    )
    checkpoints = CheckpointStore(config.run / "checkpoints")
    before: list[Before] = []
    undo = ExitStack()

    def check_branch(trunk: Path, record: Record, step: int) -> None:
        check_identity(trunk, record.identity, identity, allowed_changes(config, record))
        check_cooldown(config, record, step, limits.decay_steps)

    def prepare_run() -> tuple[int | None, list[dict[str, Any]], tuple[str, str] | None]:
        nonlocal undo
        undo = stack.enter_context(locked_unopened(config.run))
        begin_branch(config, check_branch)
        newest, record = _checked_run(config, checkpoints, identity)
        adjustments = recorded_adjustments(config.run, record, identity, allowed_changes(config, record))
        if record is not None and newest is not None:
            check_cooldown(config, record, newest, limits.decay_steps)
            before.append(Before(record, newest))
            progress = read_progress(checkpoints, newest)
            ended_by = replace(limits, cooldown=adjustments.cooldown(newest)).ended_by(progress)
            if ended_by is not None:
                known = _settings_before(config.run)
                # A start that was killed after its last step has to complete the record.
                if record.status == "finished" or known is None or not is_same(config, known):
                    return newest, [], _nothing_left(known or config, record, checkpoints, progress, ended_by)
        _check_space(config, manifest.vocab_size)
        clear_heartbeats(config.run)
        return newest, adjustments.to_json(), None

    newest, recorded, nothing_left = group.on_main(prepare_run)
    if nothing_left is not None:
        message, result = nothing_left
        raise NothingToTrain(message if group.is_main else "", result)
    check_shared(config.run, group)
    return Checked(
        context=context,
        precision=fitted.precision,
        extension=extension,
        objective=fitted.objective,
        data=fitted.data,
        limits=limits,
        identity=identity,
        initial=initial,
        checkpoints=checkpoints,
        before=before[0] if before else None,
        newest=newest,
        adjustments=Adjustments.from_json(recorded),
        memory=fitted.memory,
        clock=clock,
        undo=undo,
    )


def _settings_before(run: Path) -> TrainConfig | None:
    """Return the settings of the last start of a run, with its present place; None if they cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, ProjectError, UnusableFileError):
        return recorded_settings(run).model_copy(update={"run": run})
    return None


def _nothing_left(
    known: TrainConfig, record: Record, checkpoints: CheckpointStore, progress: Progress, ended_by: str
) -> tuple[str, str]:
    """Return the message about a run that has reached a limit, and the result of its training."""
    digest = record.weights if record.step == progress.step else None
    digest = digest or weights_digest(load_whole(checkpoints, progress.step)[0].model)
    lines = nothing_to_train(known, record.status, progress.step, ended_by)
    return "\n".join(lines), f"weights {digest} steps {progress.step}"


def _check_space(config: TrainConfig, vocab_size: int) -> None:
    each, shared = checkpoint_bytes(config, vocab_size), frozen_bytes(config, vocab_size)
    check_space(config.run / "checkpoints", each, shared)


def _open_data(stack: ExitStack, config: TrainConfig, group: Group) -> tuple[Manifest, Tokenizer]:
    """Lock the data against a new preparation for the time of the run, and return its manifest and its tokenizer."""
    stack.enter_context(reading(config.data, f"run {config.run.absolute().name}" if group.is_main else None))
    manifest = read_manifest(config.data)
    return manifest, _tokenizer(config.data, manifest)


def _check_continued(config: TrainConfig) -> None:
    """Check the places in the run before any file of it is read, and that the run which this start continues was trained."""
    check_places(config.run)
    check_nothing_is_replaced(config.run)
    run = continued_run(config)
    check_was_trained(run, read_record_if_any(run))


def _check_data(config: TrainConfig, manifest: Manifest) -> None:
    """Refuse other data than that of the run which this start continues, before its settings are compared with it."""
    run = continued_run(config)
    record = read_record_if_any(run) if CheckpointStore(run / "checkpoints").steps() else None
    if record is not None:
        check_data(run, record.identity, manifest.root_digest)


def _first_look(config: TrainConfig, manifest: Manifest) -> tuple[int | None, Precision | None]:
    """Return micro-batch and number format of an earlier start, or of the run to branch off. Compare a new run with `init`."""
    run = continued_run(config)
    record = read_record_if_any(run)
    continues = CheckpointStore(run / "checkpoints").steps()  # otherwise no weights exist that depend on the format
    if not continues:
        check_lora(config)
        check_initial(config, manifest)
    return recorded_micro(run, record), recorded_precision(run, record) if continues else None


def _initial(config: TrainConfig) -> Origin | None:
    """Return the checkpoint of `init` that a new run begins with, or the recorded one of a run that continues."""
    run = continued_run(config)
    if not CheckpointStore(run / "checkpoints").steps():
        return choose_initial(config)
    check_same_initial(config, run)
    return read_record(run).initial


def _checked_run(
    config: TrainConfig, checkpoints: CheckpointStore, identity: Mapping[str, Any]
) -> tuple[int | None, Record | None]:
    """Return the step of the newest checkpoint and the record, None for those that do not exist. Check that it is the same run."""
    newest = checkpoints.newest_verified()
    if newest is None:
        record = read_record_if_any(config.run)
        check_nothing_saved(config.run, record)
        return None, record
    record = read_record(config.run)
    check_identity(config.run, record.identity, identity, allowed_changes(config, record))
    return newest, record


def _tokenizer(data: Path, manifest: Manifest) -> Tokenizer:
    tokenizer = load_tokenizer(data / "tokenizer")
    if tokenizer.vocab_size != manifest.vocab_size:  # a larger id would be outside the embedding
        raise PreparedDataError(
            f"{data / 'tokenizer'}: it has {tokenizer.vocab_size} ids, but the manifest says {manifest.vocab_size}; "
            "run `prepare` again"
        )
    return tokenizer


def _check_fit(config: TrainConfig, manifest: Manifest, train_rows: int, val_rows: int, group: Group) -> None:
    if config.encoder is None and manifest.row_length > config.model.context:
        raise ConfigError(
            f"the rows in {config.data} have {manifest.row_length} tokens, but "
            f"model.context = {config.model.context}; raise model.context, or prepare with --row_length {config.model.context}"
        )
    for split, num_rows in (("train", train_rows), ("val", val_rows)):
        if num_rows == 0:
            raise PreparedDataError(f"{config.data}: no {split} rows; prepare from more text")
    if not any(shard.targets for shard in manifest.shards if shard.split == "train"):
        raise PreparedDataError(f"{config.data}: no token of the training rows has a loss; prepare from more text")
    check_ranks(config, group.world_size)


def check_ranks(config: TrainConfig, num_ranks: int) -> None:
    """Refuse a global batch with too few micro-batches for the ranks.

    Raises:
        ConfigError: it has too few.
    """
    if config.batch.micro_batches < num_ranks:
        raise ConfigError(
            f"batch.global_rows = {config.batch.global_rows} and batch.micro = {config.batch.micro} make "
            f"{config.batch.micro_batches} micro-batches, too few for {num_ranks} ranks; use "
            f"batch.micro = {max(1, config.batch.global_rows // num_ranks)} or less, or more rows"
        )
