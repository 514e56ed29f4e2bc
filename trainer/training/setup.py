"""Opens a training run: checks it, builds its parts, restores them, and closes them in the end."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from common.errors import ConfigError, PreparedDataError
from common.redaction import RedactingFormatter, secrets_of
from common.storage_errors import naming
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, check_space, required_bytes, steps_to_keep
from trainer.config import CheckpointConfig, TrainConfig
from trainer.data.adjustments import Changes
from trainer.data.mixture import build_order
from trainer.distributed.group import Group, joined_group
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import DeviceMark, HostMark, OwnTimer, StragglerDetector
from trainer.evaluation.tally import Grouping
from trainer.extensions.hooks import Extension
from trainer.extensions.loading import load_extension
from trainer.extensions.trust import note_trained_with
from trainer.extensions.user_model import seeded_model
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.machine.determinism import configure_determinism, device_name
from trainer.machine.memory import PeakMeter
from trainer.machine.peak_rates import peak_flops, rate_kind, unknown_mfu
from trainer.metrics import Monitor, opened_monitor
from trainer.metrics.layers import LayerObserver
from trainer.metrics.sinks.tensorboard_graph import model_graph
from trainer.model.attention import Backend, choose_backend, describe_backend
from trainer.model.decoder import Decoder
from trainer.model.float8 import convert_to_float8
from trainer.model.flops import flops_per_token
from trainer.model.forward import LossModule
from trainer.model.memory_estimate import estimate
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import build_optimizers, check_optimizer
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.fsdp import check_parallel, load_full
from trainer.parallel.wrapping import TrainingModule
from trainer.report import report_at_end
from trainer.run.bounds import check_model_size
from trainer.run.directory import check_places
from trainer.run.ledger import LEDGER, Ledger, LedgerHead
from trainer.run.limits import Plan, plan_run
from trainer.run.lock import locked_run
from trainer.run.progress import Progress, load_whole
from trainer.run.record import check_identity, check_nothing_saved, identity_of, open_record, recorded_changes, recorded_micro
from trainer.run.signals import stop_request
from trainer.training.ending import Ending, opened_ending
from trainer.training.micro_batch_size import with_micro
from trainer.training.step import make_scaler
from trainer.training.training_run import Session, known_to, restore
from trainer.training.wrapped_model import wrapped
from trainer.watchdog.watch import Heartbeat, Patience, ProcessId, clear_heartbeats, watched

__all__ = ["opened_session"]

_log = logging.getLogger(__name__)


@contextmanager
def opened_session(config: TrainConfig, *, trust_extension: bool = True) -> Iterator[Session]:
    """Checks the settings against data and machine, builds all parts, and restores the newest checkpoint if there is one.

    With `trust_extension` the digest of the user's own file is noted: see `trainer.extensions.trust`.

    Raises:
        ConfigError: the settings do not fit the data, the machine or the run that is there.
        PreparedDataError: the data is damaged or missing.
        CheckpointError: checkpoints are there, and none is intact.
    """
    configure_determinism(config)
    _allow_open_shards()
    extension = load_extension(config.extension)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_request())
        group = stack.enter_context(joined_group(config.device, config.watchdog.slow_s))
        _log_to_stderr(logging.INFO if group.is_main else logging.WARNING, secrets_of(config.log.mlflow_uri or ""))
        _note_extension(extension, group, trusted=trust_extension)
        stack.enter_context(_held_data(config, group))
        manifest = read_manifest(config.data)
        train_rows = Rows(config.data, manifest, "train", verify=config.verify_data)
        val_rows = Rows(config.data, manifest, "val", verify=config.verify_data)
        backend = choose_backend(
            config.attention,
            group.device,
            config.precision,
            config.model.head_size,
            compiled=config.compiles(group.device.type),
        )
        meter = PeakMeter.start(group.device)
        config = with_micro(config, manifest, group, backend, extension, group.on_main(lambda: _recorded_micro(config.run)))
        _check_fit(config, manifest, len(train_rows), len(val_rows), group)
        check_parallel(config, group)
        check_optimizer(config)
        plan = plan_run(config, manifest, len(train_rows))
        order = build_order(config.seed, train_rows, manifest.sources, config.mixture.weights)
        identity = identity_of(
            config, manifest, group, decay_steps=plan.decay_steps, backend=backend, extension_digest=extension.digest
        )
        checkpoints = CheckpointStore(config.run / "checkpoints")

        def prepare_run() -> tuple[int | None, list[dict[str, Any]]]:
            stack.enter_context(locked_run(config.run))
            newest = _checked_run(config, checkpoints, identity)
            check_space(config.run / "checkpoints", required_bytes(_tensor_bytes(config, manifest.vocab_size)))
            clear_heartbeats(config.run)
            return newest, recorded_changes(config.run, identity, config.resume.allow_changes).to_json()

        newest, recorded = group.on_main(prepare_run)
        heartbeat = stack.enter_context(_watched(config, group))
        checkpoint = None if newest is None else load_whole(checkpoints, newest)
        model = _model(config, manifest, group, extension, checkpoint)
        training, changes = _training_module(
            model, config, Changes.from_json(recorded), group, newest or 0, manifest, backend, extension
        )
        average = WeightAverage(model, config.ema) if config.ema.decay is not None else None
        resumed = Progress() if checkpoint is None else restore(checkpoint, model, training, average)
        # Not before: settings that do not fit the checkpoint leave the run as it was.
        group.on_main(
            lambda: open_record(config.run, config, manifest, identity, extension.source, group.world_size, changes, newest)
        )
        head = None if checkpoint is None else LedgerHead(**checkpoint.state["ledger"])
        if group.is_main and config.log.report:
            stack.callback(report_at_end, config.run)  # once all else is closed, however the run ends
        ending = stack.enter_context(opened_ending(config, group, resumed.step))
        saver = AsyncSaver(partial(_write, checkpoints, config.checkpoint))
        stack.callback(_let_finish, saver, heartbeat)  # before the record names the checkpoints, and the run's lock goes
        ledger = stack.enter_context(_opened_ledger(config, manifest, len(train_rows), head, resumed.step, group))
        monitor = stack.enter_context(_opened_monitor(config, group, plan, checkpoint, ending))
        stack.callback(heartbeat.at, "save")  # first of all, as closing the sinks and writing the report may take long
        tokenizer = _tokenizer(config.data, manifest)
        session = Session(
            config=config,
            group=group,
            manifest=manifest,
            plan=plan,
            train_rows=train_rows,
            order=order,
            val_rows=val_rows,
            tokenizer=tokenizer,
            model=model,
            training=training,
            average=average,
            extension=extension,
            checkpoints=checkpoints,
            monitor=monitor,
            observer=LayerObserver(model, group, config.log.layers_every_steps, config.log.histograms_every_steps),
            ledger=ledger,
            flops_each=flops_per_token(config.model, manifest.vocab_size, manifest.row_length),
            peak=peak_flops(device_name(group.device), rate_kind(config.precision, tf32=config.tf32)),
            guard=_guard(config, checkpoint),
            stop=stop,
            resumed=resumed,
            changes=changes,
            memory=estimate(
                config,
                manifest.vocab_size,
                manifest.row_length,
                group.world_size,
                changes.batch(config.batch, resumed.step + 1).micro_rows,
                backend,
                group.device.type,
            ),
            meter=meter,
            heartbeat=heartbeat,
            own_timer=OwnTimer(DeviceMark if group.device.type == "cuda" else HostMark),
            stragglers=StragglerDetector(),
            replicas=ReplicaCheck(
                parameters_by_name(model), group, 0 if config.parallel == "fsdp" else config.watchdog.replicas_steps, resumed.step
            ),
            saver=saver,
            saved_step=newest,
            grouping=Grouping.of(manifest, tokenizer),
            train_losses=LossMean() if checkpoint is None else LossMean(**checkpoint.state["train_losses"]),
            ending=ending,
        )
        _introduce(session, manifest, continued=newest is not None)
        del training, checkpoint  # this frame lives as long as the run, and would keep them
        yield session


def _note_extension(extension: Extension, group: Group, *, trusted: bool) -> None:
    if extension.digest is not None and group.is_main and trusted:
        note_trained_with(extension.digest)


@contextmanager
def _held_data(config: TrainConfig, group: Group) -> Iterator[None]:
    """Keeps the data from being replaced. Whatever cannot be written meanwhile is a file of the run."""
    with naming(config.run), reading(config.data, f"run {config.run.absolute().name}" if group.is_main else None):
        yield


def _recorded_micro(run: Path) -> int | None:
    """See `recorded_micro`; it is the first look into the run's folder."""
    check_places(run)
    return recorded_micro(run)


def _log_to_stderr(level: int, secrets: Iterable[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s", secrets))
    logging.basicConfig(level=level, handlers=[handler])


def _tokenizer(data: Path, manifest: Manifest) -> Tokenizer:
    tokenizer = load_tokenizer(data / "tokenizer")
    if tokenizer.vocab_size != manifest.vocab_size:  # a larger id would lead outside the embedding
        raise PreparedDataError(
            f"{data / 'tokenizer'}: it has {tokenizer.vocab_size} ids, but the manifest says {manifest.vocab_size}; "
            "run `prepare` again"
        )
    return tokenizer


def _checked_run(config: TrainConfig, checkpoints: CheckpointStore, identity: Mapping[str, Any]) -> int | None:
    """The step to go on from, if there is a run, and it is this one."""
    newest = checkpoints.newest_verified()
    if newest is None:
        check_nothing_saved(config.run)
    else:
        check_identity(config.run, identity, config.resume.allow_changes)
    return newest


def _allow_open_shards() -> None:
    """Raises the number of files that may be open as far as the system lets it: an open shard takes two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _introduce(session: Session, manifest: Manifest, *, continued: bool) -> None:
    config, device = session.config, session.group.device
    _log.info("%s", _describe(session, manifest, continued=continued))
    _log.info("%s; %s", session.order.description, describe_backend(session.training.backend))
    if session.peak is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        _log.info("%s", unknown_mfu(gpu, rate_kind(config.precision, tf32=config.tf32)))
    if not continued and session.group.is_main and session.extension.build_model is None:  # one's own may need values
        session.monitor.model(model_graph(partial(Decoder, config.model, manifest.vocab_size), manifest.row_length))


def _describe(session: Session, manifest: Manifest, *, continued: bool) -> str:
    config, group = session.config, session.group
    num_weights = sum(parameter.numel() for parameter in parameters_by_name(session.model).values())
    return (
        f"{f'resuming {config.run} at step {session.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{num_weights / 1e6:.2f}M weights, vocabulary {manifest.vocab_size}, {len(session.train_rows)} training and "
        f"{len(session.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.precision}"
    )


def _check_fit(config: TrainConfig, manifest: Manifest, train_rows: int, val_rows: int, group: Group) -> None:
    if manifest.row_length > config.model.context:
        raise ConfigError(
            f"the rows in {config.data} have {manifest.row_length} tokens, but "
            f"model.context = {config.model.context}; raise model.context, or prepare with --row_length {config.model.context}"
        )
    for split, num_rows in (("train", train_rows), ("val", val_rows)):
        if num_rows == 0:
            raise PreparedDataError(f"{config.data}: no {split} rows; prepare from more text")
    if config.batch.micro_batches < group.world_size:
        raise ConfigError(
            f"batch.global_rows = {config.batch.global_rows} and batch.micro = {config.batch.micro} make "
            f"{config.batch.micro_batches} micro-batches, too few for {group.world_size} ranks; use "
            f"batch.micro = {max(1, config.batch.global_rows // group.world_size)} or less, or more rows"
        )


def _model(config: TrainConfig, manifest: Manifest, group: Group, extension: Extension, checkpoint: Checkpoint | None) -> nn.Module:
    """The model on its device, with the checkpoint's weights or fresh ones."""
    if extension.build_model is None:
        check_model_size(config.model, manifest.vocab_size)
    model = seeded_model(extension, config.model, manifest.vocab_size, config.seed)
    if config.parallel == "ddp" or group.world_size == 1:
        model.to(group.device)  # else each part goes there when it is cut
    if config.precision == "float8":
        convert_to_float8(model, group.device)
    if checkpoint is not None:
        load_full(model, checkpoint.model)
    return model


def _training_module(
    model: nn.Module,
    config: TrainConfig,
    changes: Changes,
    group: Group,
    step: int,
    manifest: Manifest,
    backend: Backend,
    extension: Extension,
) -> tuple[TrainingModule, Changes]:
    """What trains from after `step` on, and the changes with what it took to make it fit."""
    loss = LossModule(model, config.loss, extension.own_loss)
    module, accumulation, changes = wrapped(loss, config, changes, group, step + 1, manifest, backend)
    training = TrainingModule(
        loss=loss,
        module=module,
        accumulation=accumulation,
        scaler=make_scaler(config, group.device),
        backend=backend,
        optimizers=build_optimizers(model, config.optim),
    )
    return training, changes


def _guard(config: TrainConfig, checkpoint: Checkpoint | None) -> Guard:
    guard = Guard(config.guard, scaled=config.precision == "fp16")
    if checkpoint is not None:
        guard.from_json(checkpoint.state["guard"])
    return guard


def _tensor_bytes(config: TrainConfig, vocab_size: int) -> list[int]:
    """Of the weights, the optimizer's state and the average in a checkpoint; a model of one's own may differ."""
    whole = estimate(config, vocab_size, config.model.context, 1, 1)
    return [whole.weights, whole.optimizer, whole.average]


@contextmanager
def _opened_ledger(
    config: TrainConfig, manifest: Manifest, num_rows: int, head: LedgerHead | None, step: int, group: Group
) -> Iterator[Ledger | None]:
    """The ledger up to what the checkpoint knows of it, on rank 0; an error there is raised on every rank."""
    with ExitStack() as stack:

        def open_on_main() -> None:
            ledger = stack.enter_context(closing(Ledger(config.run / LEDGER, head)))
            weights = config.mixture.weights
            ledger.order(step=step, seed=config.seed, data=manifest.root_digest, rows=num_rows, mixture=weights)
            opened.append(ledger)

        opened: list[Ledger] = []
        group.on_main(open_on_main)
        yield opened[0] if opened else None


@contextmanager
def _opened_monitor(
    config: TrainConfig, group: Group, plan: Plan, checkpoint: Checkpoint | None, ending: Ending
) -> Iterator[Monitor]:
    """The monitor, which is told of an error that ends the run before it closes."""
    known = None if checkpoint is None else known_to(checkpoint)
    with opened_monitor(config, group, last_step=plan.last_step, known=known) as monitor:
        try:
            yield monitor
        except BaseException as error:
            ending.tell(error, monitor)
            raise


def _watched(config: TrainConfig, group: Group) -> AbstractContextManager[Heartbeat]:
    settings = config.watchdog
    enabled = settings.enabled == "on" or (settings.enabled == "auto" and "RANK" in os.environ)
    return watched(
        config.run,
        Patience(settings.stall_s, settings.slow_s),
        rank=group.rank,
        local_rank=group.local_rank,
        processes=_processes_here(group) if enabled else (),
        enabled=enabled,
    )


def _processes_here(group: Group) -> list[ProcessId]:
    """The processes of the ranks on this node, in their order; all ranks tell each other theirs."""
    own = ProcessId.own()
    told = torch.tensor([own.pid, own.started], dtype=torch.int64, device=group.device)
    if group.world_size > 1:
        told = group.gather(told, told.new_empty(2 * group.world_size))
    first = group.rank - group.local_rank
    return [ProcessId(*pair) for pair in told.view(-1, 2)[first : first + group.local_world_size].tolist()]


def _write(checkpoints: CheckpointStore, settings: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Saves, and deletes what need not be kept; in the background."""
    with naming(checkpoints.directory):
        checkpoints.save(checkpoint)
    best = checkpoint.state["progress"]["best_step"]
    checkpoints.retain(steps_to_keep(checkpoints.steps(), last=settings.keep_last, every=settings.keep_every, best=best))


def _let_finish(saver: AsyncSaver, heartbeat: Heartbeat) -> None:
    """Waits for a save that is still running when the run ends, for whatever reason it does."""
    heartbeat.at("save")
    try:
        saver.wait()
    except Exception as error:
        _log.error("%s", error)
