"""The settings of a run, chosen for its data, the machine and an earlier start. No file of the run is changed except its lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.storage_errors import naming
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint.of_run import copy_state, load_whole, weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.config import BranchConfig, Precision, TrainConfig
from trainer.context import RunContext
from trainer.data.mixture import build_order
from trainer.distributed.group import Group, check_same_data
from trainer.extensions.hooks import Extension
from trainer.finetuning.initial_weights import InitialRun, check_lora, check_same_initial
from trainer.finetuning.task import Task, make_task
from trainer.machine.memory import PeakMeter
from trainer.machine.precision import ChosenPrecision, with_precision
from trainer.model.attention import backend_of
from trainer.optim.schedule import cooldown_start
from trainer.parallel.fsdp import check_parallel
from trainer.runs.layout import LEDGER, METRICS, check_nothing_is_replaced, check_paths
from trainer.runs.limits import StopCriteria, plan_run, with_shorter_warmup
from trainer.runs.lock import locked_unopened
from trainer.runs.record import Origin, Record, check_was_trained, recorded_micro, recorded_precision, write_record
from trainer.runs.saved_run import SavedRun
from trainer.training.micro_batch_size import batch_for, with_micro
from trainer.training.start.identity import check_data
from trainer.training.trainable import RunData

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


@dataclass(frozen=True)
class StartPlan:
    context: RunContext
    extension: Extension
    precision: ChosenPrecision
    task: Task
    data: RunData
    criteria: StopCriteria
    memory: PeakMeter
    earlier: tuple[EarlierRun, ...]  # the run that this start continues; empty on all ranks except rank 0
    initial: InitialRun | None


def plan_start(stack: ExitStack, config: TrainConfig, group: Group, extension: Extension, *, lock: bool = True) -> StartPlan:
    """Compare the settings with the data and the machine, and choose those that are `auto`, but for the size of the micro-batch.

    With `lock` the run is locked first.
    """
    if config.run.resolve() == config.data.resolve():  # both have a report.html, a tokenizer and a lock
        raise ConfigError(f"{config.run}: run and data are the same folder; name another folder for the run (--run)")
    stack.enter_context(naming(config.run))  # a file that cannot be written from here on is a file of the run
    found: list[EarlierRun] = []
    initial = None if config.init is None else InitialRun(config.init)
    group.on_main(lambda: found.append(read_earlier(stack, config, lock=lock)))
    manifest, tokenizer = group.on_all(lambda: _open_data(stack, config, group))
    check_same_data(config.data, manifest.root_digest, group)
    recorded_rows, recorded_format = group.on_main(lambda: found[0].choices(config, manifest, initial))
    task = group.on_all(lambda: make_task(config, manifest, extension.hooks))
    train_rows = task.rows(config.data, manifest, "train", verify=config.verify_data)
    val_rows = task.rows(config.data, manifest, "val", verify=config.verify_data)
    _check_rows(config, manifest, len(train_rows), len(val_rows))
    config = with_shorter_warmup(config, manifest, len(train_rows))
    config, precision = with_precision(config, group, recorded_format)
    batch = batch_for(config.batch, recorded_rows, group.world_size, elastic=config.reproducibility == "elastic")
    config = config.model_copy(update={"batch": batch})
    backend = backend_of(config, group.device)
    memory = PeakMeter(group.device)
    context = RunContext(config, manifest, group, backend, extension.has_step or task.sums is not None)
    order = build_order(config.seed, train_rows, manifest.sources, config.mixture.weights)
    data = RunData(context, train_rows, val_rows, order, tokenizer)
    criteria = plan_run(config, manifest, len(train_rows))
    return StartPlan(context, extension, precision, task, data, criteria, memory, tuple(found), initial)


def with_micro_batch(plan: StartPlan) -> StartPlan:
    """Choose the size of the micro-batch if it is `auto`, and check that each rank gets its part of the global batch."""
    context = with_micro(plan.context, plan.extension, plan.task)
    num_ranks = context.group.world_size
    check_shares(context.config, num_ranks)
    check_parallel(context.config.parallel, context.config.batch, num_ranks)
    return replace(plan, context=context, data=replace(plan.data, context=context))


def check_shares(config: TrainConfig, num_ranks: int) -> None:
    if config.batch.micro_batches < num_ranks:
        raise ConfigError(
            f"batch.global_batch_size = {config.batch.global_batch_size} and batch.micro_batch_size = "
            f"{config.batch.micro_batch_size} make {config.batch.micro_batches} micro-batches, too few for {num_ranks} ranks; use "
            f"batch.micro_batch_size = {max(1, config.batch.global_batch_size // num_ranks)} or less, or more rows"
        )


def _open_data(stack: ExitStack, config: TrainConfig, group: Group) -> tuple[Manifest, Tokenizer]:
    """Lock the data against a new preparation for the time of the run, and return its manifest and its tokenizer."""
    stack.enter_context(reading(config.data, f"run {config.run.absolute().name}" if group.is_main else None))
    manifest, folder = read_manifest(config.data), Path(config.data, "tokenizer")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != manifest.vocab_size:  # a larger id would be outside the embedding
        raise PreparedDataError(
            f"{folder}: it has {tokenizer.vocab_size} ids, but the manifest says {manifest.vocab_size}; run `prepare` again"
        )
    return manifest, tokenizer


def _check_rows(config: TrainConfig, manifest: Manifest, train_rows: int, val_rows: int) -> None:
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
