"""The settings of a run, chosen for its data and the machine. No file of the run is changed except its lock."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import ConfigError, PreparedDataError
from common.storage_errors import naming
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.mixture import build_order
from trainer.distributed.group import Group, check_same_data
from trainer.extensions.hooks import Extension
from trainer.finetuning.initial_weights import InitialRun
from trainer.finetuning.task import Task, make_task
from trainer.machine.memory import PeakMeter
from trainer.machine.precision import ChosenPrecision, with_precision
from trainer.model.attention import backend_of
from trainer.parallel.fsdp import check_parallel
from trainer.runs.limits import StopCriteria, plan_run, with_shorter_warmup
from trainer.training.micro_batch_size import batch_for, with_micro
from trainer.training.start.earlier import EarlierRun, read_earlier
from trainer.training.trainable import RunData


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
