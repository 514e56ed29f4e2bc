"""Opens a training run: checks it, builds its parts, restores them, and closes them at the end."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from common.errors import ConfigError, StoppedBySignal
from common.redaction import RedactingFormatter, secrets_of
from common.settings.load import AUTO
from common.storage_errors import naming
from common.terminal_lines import LineHandler
from data_pipeline.dataset.manifest import Manifest
from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, steps_to_keep
from trainer.config import CheckpointConfig, TrainConfig, settings_without_effect
from trainer.data.adjustments import Adjustments
from trainer.distributed.devices import num_gpus
from trainer.distributed.group import Group, joined_group
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import DeviceMark, HostMark, OwnTimer, StragglerDetector
from trainer.doctor.machine import check_start
from trainer.evaluation.tally import Grouping
from trainer.extensions.hooks import Extension
from trainer.extensions.loading import load_extension
from trainer.extensions.trust import note_trained_with
from trainer.finetuning.initial_weights import read_initial, write_reference
from trainer.finetuning.task import Task
from trainer.health.convergence import LossMean
from trainer.health.guard import Guard
from trainer.machine.determinism import configure_determinism, device_name
from trainer.machine.environment import unlocked_here
from trainer.machine.peak_rates import Flops, peak_flops, rate_kind, unknown_mfu
from trainer.machine.profiler import StepProfiler
from trainer.metrics import Monitor, opened_monitor
from trainer.metrics.layers import LayerObserver
from trainer.metrics.run_status import RunStatus, opened_run_status
from trainer.metrics.sinks.tensorboard_graph import model_graph
from trainer.model.attention import describe_backend
from trainer.model.decoder import Decoder, flops_per_token
from trainer.model.float8 import convert_to_float8
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import build_optimizers
from trainer.optim.weight_average import WeightAverage
from trainer.planning.forecast import Forecast, forecast
from trainer.planning.lines import brief_lines
from trainer.planning.preparation import other_preparation
from trainer.report import report_at_end
from trainer.runs.bounds import check_model_size
from trainer.runs.clock import Clock
from trainer.runs.context import RunContext
from trainer.runs.ledger import LEDGER, Ledger
from trainer.runs.progress import Progress
from trainer.runs.record import note_trained_weights
from trainer.runs.record import open_record as write_record
from trainer.runs.signals import StopRequest, stop_request
from trainer.runs.state import RunState, load_whole
from trainer.training.adjuster import Adjuster, wrapped
from trainer.training.branch import is_new_branch
from trainer.training.checks import Checked, check
from trainer.training.evaluator import Evaluator
from trainer.training.micro_batch_size import expected_memory
from trainer.training.recovery import Recovery
from trainer.training.reporter import Reporter, TrainLoss
from trainer.training.saver import Saver
from trainer.training.trainable import Trainable, hold_reference, make_scaler, new_loss, new_model
from trainer.training.training_run import TrainingRun
from trainer.watchdog.beat import Patience
from trainer.watchdog.heartbeat import Heartbeat
from trainer.watchdog.processes import ProcessId
from trainer.watchdog.watch import watched

__all__ = ["opened_run"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """The model with its optimizers, from a checkpoint or new."""

    trainable: Trainable
    state: RunState | None
    """The state of the checkpoint, None for a new run."""
    adjustments: Adjustments
    """Adjustments of earlier starts, and those that were needed to fit the model into memory."""
    heartbeat: Heartbeat

    @property
    def progress(self) -> Progress:
        return Progress() if self.state is None else self.state.progress


@contextmanager
def opened_run(config: TrainConfig, *, trust_extension: bool = True) -> Iterator[TrainingRun]:
    """Check the settings against data and machine, build all parts, and restore the newest checkpoint if there is one.

    With `trust_extension` the digest of the extension is stored: see `trainer.extensions.trust`.

    Raises:
        ConfigError: the settings do not fit the data, the machine or the existing run.
        PreparedDataError: the data is damaged or missing.
        CheckpointError: the run has checkpoints, but none is intact.
    """
    clock = Clock()
    configure_determinism(config)
    _allow_open_shards()
    extension = load_extension(config.extension)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_request())
        if os.environ.get("LOCAL_RANK", "0") == "0":
            check_start(min(num_gpus(config.device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        group = stack.enter_context(joined_group(config.device, config.watchdog.slow_s))
        _log_to_stderr(logging.INFO if group.is_main else logging.WARNING, secrets_of(config.log.mlflow_uri or ""))
        if trust_extension and extension.digest is not None and group.is_main:
            note_trained_with(extension.digest)
        checked = check(stack, config, group, extension, clock)
        _end_if_asked(checked, stop)
        heartbeat = stack.enter_context(_watched(checked.context))  # from here on the watchdog detects a rank without progress
        restored = restore(checked, build(checked), heartbeat)
        _end_if_asked(checked, stop)
        # Not earlier, because settings that do not fit the checkpoint must leave the files of the run unchanged.
        run = open_record(stack, checked, restored, stop)
        del restored
        with run.clock.paused():
            introduce(run, continued=checked.newest is not None)
        yield run


def _end_if_asked(checked: Checked, stop: StopRequest) -> None:
    """End the start if a rank was asked to stop. No file of the run has changed yet.

    Raises:
        StoppedBySignal: a rank was asked to stop.
        KeyboardInterrupt: the same, if this rank was asked with Ctrl-C, and the run has no checkpoint.
    """
    group, config = checked.context.group, checked.context.config
    if group.smallest(0 if stop.signal_name is None else -1) == 0:
        return
    newest = group.on_main(lambda: None if checked.before is None or is_new_branch(checked.before.record) else checked.newest)
    saved = "has no checkpoint yet" if newest is None else f"has its checkpoint of step {newest}"
    message = f"no step was trained, and no file was changed; {config.run} {saved}; run the same command again to go on"
    if newest is None and stop.signal_name == "SIGINT":
        raise KeyboardInterrupt(message)
    raise StoppedBySignal(message if group.local_rank == 0 else "")


def build(checked: Checked) -> tuple[Trainable, Adjustments]:
    """Return the model with new weights, wrapped for training, and the adjustments, with those that were needed to fit it."""
    step = (checked.newest or 0) + 1
    return build_trainable(checked.context, checked.extension, checked.objective, checked.adjustments, step)


def build_trainable(
    context: RunContext, extension: Extension, objective: Task, adjustments: Adjustments, step: int
) -> tuple[Trainable, Adjustments]:
    """Return the model for a step with new weights, wrapped for training, and the adjustments, with those that it needed to fit."""
    config, group = context.config, context.group
    if extension.build_model is not None and config.model.base_width is not None:
        raise ConfigError("model.base_width scales the built-in model, and the extension builds another one; remove one of them")
    if extension.build_model is None:
        check_model_size(config.model, context.manifest.vocab_size, counted=objective.num_weights, lora=config.lora)
    model = new_model(extension, objective, config, context.manifest.vocab_size)
    if config.parallel == "ddp" or group.world_size == 1:
        model.to(group.device)  # FSDP moves each part when it cuts the weights
    if config.number_format == "float8":
        convert_to_float8(model, group.device)
    loss = new_loss(model, extension, objective, config)
    module, accumulation, adjustments = wrapped(loss, context, adjustments, step)
    adapted = config.lora.rank is not None  # muP has no rule for adapters, so their rate is the given one at each width
    trainable = Trainable(
        context=context,
        extension=extension,
        objective=objective,
        loss=loss,
        module=module,
        accumulation=accumulation,
        scaler=make_scaler(context),
        optimizers=build_optimizers(model, config.optim, 1.0 if adapted else config.model.width_ratio),
        average=None if config.ema.decay is None else WeightAverage(model, config.ema),
    )
    return trainable, adjustments


def restore(checked: Checked, built: tuple[Trainable, Adjustments], heartbeat: Heartbeat) -> Restored:
    """Restore the tensors of the newest checkpoint, if there is one. Otherwise load the weights that a new run begins with."""
    trainable, adjustments = built
    init, origin, state = checked.context.config.init, checked.initial, None
    if checked.newest is not None:
        checkpoint, state = load_whole(checked.checkpoints, checked.newest)
        trainable.restore(checkpoint, state)
    elif init is not None and origin is not None:
        weights = checked.context.group.on_all(lambda: read_initial(init, origin))
        trainable.begin_with(weights)
        _log.info("the weights are those of step %d of %s", origin.step, init)
        if trainable.objective.reference is not None:
            checked.context.group.on_main(lambda: write_reference(checked.context.config.run, weights))
    elif (pretrained := checked.objective.pretrained) is not None:
        trainable.begin_with(checked.context.group.on_all(pretrained))
    if trainable.objective.reference is not None:
        hold_reference(checked.context, trainable.objective, checked.initial)
    return Restored(trainable, state, adjustments, heartbeat)


def open_record(stack: ExitStack, checked: Checked, restored: Restored, stop: StopRequest) -> TrainingRun:
    """Write the record of a new or resumed run, and open everything that the training writes to."""
    context, trainable, heartbeat = checked.context, restored.trainable, restored.heartbeat
    config, group, step = context.config, context.group, restored.progress.step
    source, before, precision = checked.extension.source, checked.before, checked.precision
    files, initial = checked.objective.files, checked.initial

    def write() -> None:
        checked.undo.pop_all()
        write_record(context, checked.identity, source, restored.adjustments, before, precision, files, initial)
        if trainable.num_trained < trainable.num_weights:
            note_trained_weights(config.run, trainable.num_trained, trainable.num_weights)

    group.on_main(write)
    if group.is_main and config.log.report:
        stack.callback(report_at_end, config.run)  # after everything else is closed, for any end of the run
    ending = stack.enter_context(opened_run_status(config, group, step))
    writer = AsyncSaver(partial(_write, checked.checkpoints, config.checkpoint))
    stack.callback(_let_finish, writer, heartbeat)  # before the record names the checkpoints, and before the run's lock is released
    ledger = _open_ledger(stack, checked, restored.state)
    monitor = stack.enter_context(_opened_monitor(checked, restored.state, ending))
    stack.callback(heartbeat.at, "save")  # runs first, because closing the sinks and writing the report may take long
    compared_steps = 0 if config.parallel == "fsdp" else config.watchdog.replicas_steps
    replica_check = ReplicaCheck(parameters_by_name(trainable.model), group, compared_steps, step)
    tokenizer = checked.data.tokenizer if checked.objective.predicts_tokens else None
    grouping = Grouping.of(config.data, context.manifest, tokenizer)
    adjuster = Adjuster(context, restored.adjustments, monitor, ledger)
    reporter = _reporter(checked, restored, adjuster, ending, stop)
    profiler = StepProfiler(config.run, config.log.profile_steps, group.rank, group.device)
    stack.callback(profiler.close)
    saver = Saver(trainable, reporter, checked.limits, replica_check, checked.checkpoints, writer, checked.newest)
    return TrainingRun(
        data=checked.data,
        trainable=trainable,
        limits=checked.limits,
        resumed=restored.progress,
        heartbeat=heartbeat,
        own_timer=OwnTimer(DeviceMark if group.device.type == "cuda" else HostMark),
        replica_check=replica_check,
        adjuster=adjuster,
        reporter=reporter,
        saver=saver,
        evaluator=Evaluator(checked.data, trainable, reporter, adjuster, saver, grouping, heartbeat.beat),
        recovery=Recovery(trainable, saver, reporter, adjuster, replica_check, heartbeat),
        expected_memory=expected_memory(context, adjuster.adjustments.batch(config.batch, step + 1).micro_rows, checked.objective),
        memory=checked.memory,
        profiler=profiler,
    )


def _reporter(checked: Checked, restored: Restored, adjuster: Adjuster, ending: RunStatus, stop: StopRequest) -> Reporter:
    context, manifest = checked.context, checked.context.manifest
    config, group = context.config, context.group
    checked.clock.resume(restored.progress.seconds, restored.progress.ending_s)
    checked.limits.cooldown = restored.adjustments.cooldown(restored.progress.step)
    reporter = Reporter(
        context=context,
        limits=checked.limits,
        clock=checked.clock,
        stop=stop,
        monitor=adjuster.monitor,
        ledger=adjuster.ledger,
        guard=Guard(config.guard, scaled=config.number_format == "fp16"),
        train_losses=LossMean(),
        observer=LayerObserver(restored.trainable.model, group, config.log.layers_every_steps, config.log.histograms_every_steps),
        adjuster=adjuster,
        ending=ending,
        flops=Flops(
            each=_flops_per_target(checked.objective, config, manifest),
            peak=peak_flops(device_name(group.device), rate_kind(config.number_format, tf32=config.tf32)),
        ),
        stragglers=StragglerDetector(),
        loss=TrainLoss(
            own=restored.trainable.extension.own_loss is not None or restored.trainable.extension.has_step,
            measures=restored.trainable.objective.step_metrics,
            has_perplexity=restored.trainable.objective.has_perplexity,
        ),
    )
    if restored.state is not None:
        reporter.restore(restored.state, rolled_back=False)
    return reporter


def _flops_per_target(objective: Task, config: TrainConfig, manifest: Manifest) -> float:
    if objective.flops is not None:
        return objective.flops(config.model, manifest)
    return flops_per_token(config.model, manifest.vocab_size, manifest.row_length, config.lora)


def introduce(run: TrainingRun, *, continued: bool) -> None:
    """Log the size of model, data and group and the settings without effect, and give the graph of a new model to the sinks."""
    context, monitor = run.data.context, run.reporter.monitor
    config, device = context.config, context.group.device
    _log.info("%s", _describe(run, continued=continued))
    if (other := other_preparation(config.recipe, context.manifest)) and not continued:
        _log.info("%s", other)
    if config.recipe == AUTO and not continued:
        _log.info("%s", _chosen(run))
    _log.info("%s; attention %s", run.data.order.description, describe_backend(context.backend))
    if context.group.is_main:
        if unlocked := unlocked_here():
            _log.warning("%s; results may differ from those of an installation from the lock", unlocked)
        _warn_of_settings(context, run.trainable)
        run.reporter.forecast = _forecast(run)
        for line in brief_lines(run.reporter.forecast):
            _log.info("%s", line)
    if run.reporter.flops.peak is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        _log.info("%s", unknown_mfu(gpu, rate_kind(config.number_format, tf32=config.tf32)))
    if not continued and context.group.is_main and _is_built_in(run):  # a user's model may need real values
        monitor.model(model_graph(partial(Decoder, config.model, context.manifest.vocab_size), context.manifest.row_length))


def _is_built_in(run: TrainingRun) -> bool:
    return run.extension.build_model is None and run.trainable.objective.model is None


def _forecast(run: TrainingRun) -> Forecast:
    context, data = run.data.context, run.data
    return forecast(
        context.config,
        context.manifest,
        run.limits,
        num_weights=run.trainable.num_weights,
        num_rows=(len(data.train_rows), len(data.val_rows)),
        done=run.resumed,
        memory=run.expected_memory,
    )


def _chosen(run: TrainingRun) -> str:
    """Return what the recipe `auto` has chosen, in one sentence."""
    config = run.data.context.config
    model, limits = config.model, config.limits
    bounds = {name: getattr(limits, name) for name in ("minutes", "epochs", "steps", "tokens")}
    ends = " or ".join(f"limits.{name} = {value:g}" for name, value in bounds.items() if value is not None)
    return (
        f"recipe auto: {model.layers} layers of width {model.width}, {config.batch.global_rows} rows in a step, "
        f"{config.optim.kind}, until {ends}; settings that you give are kept (docs/guide/model-size.md)"
    )


def _warn_of_settings(context: RunContext, trainable: Trainable) -> None:
    """Warn about each setting that has no effect in this run."""
    for warning in settings_without_effect(
        context.config,
        device=context.group.device.type,
        num_ranks=context.group.world_size,
        watched=_is_watched(context.config),
        own_loss=trainable.extension.own_loss is not None or trainable.objective.step is not None,
        own_model=not isinstance(trainable.model, Decoder),
    ):
        _log.warning("%s", warning)


def _describe(run: TrainingRun, *, continued: bool) -> str:
    context, data = run.data.context, run.data
    config, group = context.config, context.group
    return (
        f"{f'resuming {config.run} at step {run.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{_weights(run.trainable)}, vocabulary {context.manifest.vocab_size}, {len(data.train_rows)} training and "
        f"{len(data.val_rows)} validation rows of {context.manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.number_format}"
    )


def _weights(trainable: Trainable) -> str:
    trained, total = trainable.num_trained, trainable.num_weights
    text = f"{total / 1e6:.2f}M weights"
    return text if trained == total else f"{text}, of which {trained / 1e6:.3g}M ({trained / total:.2%}) are trained"


def _open_ledger(stack: ExitStack, checked: Checked, state: RunState | None) -> Ledger | None:
    """Open the ledger on rank 0, cut to the lines that the checkpoint knows. An error there is raised on every rank."""
    config = checked.context.config
    opened: list[Ledger] = []

    def open_on_main() -> None:
        ledger = stack.enter_context(closing(Ledger(config.run / LEDGER, None if state is None else state.ledger)))
        ledger.order(
            step=0 if state is None else state.progress.step,
            seed=config.seed,
            data=checked.context.manifest.root_digest,
            rows=len(checked.data.train_rows),
            mixture=config.mixture.weights,
        )
        opened.append(ledger)

    checked.context.group.on_main(open_on_main)
    return opened[0] if opened else None


@contextmanager
def _opened_monitor(checked: Checked, state: RunState | None, ending: RunStatus) -> Iterator[Monitor]:
    """Open the monitor. Before it closes, it receives the error that ends the run."""
    known = None if state is None else state.known
    config, group = checked.context.config, checked.context.group
    with opened_monitor(config, group, last_step=checked.limits.last_step, cut_off=known) as monitor:
        try:
            yield monitor
        except BaseException as error:
            ending.tell(error, monitor)
            raise


def _log_to_stderr(level: int, secrets: Iterable[str]) -> None:
    handler = LineHandler()
    handler.setFormatter(RedactingFormatter("%(message)s", secrets))
    logging.basicConfig(level=level, handlers=[handler])


def _allow_open_shards() -> None:
    """Raise the limit on open files to the maximum of the system. An open shard takes two."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watched(context: RunContext) -> AbstractContextManager[Heartbeat]:
    config, group = context.config, context.group
    settings, enabled = config.watchdog, _is_watched(config)
    return watched(
        config.run,
        Patience(settings.stall_s, settings.slow_s),
        rank=group.rank,
        local_rank=group.local_rank,
        processes=_processes_here(group) if enabled else (),
        num_ranks=group.world_size,
        enabled=enabled,
    )


def _is_watched(config: TrainConfig) -> bool:
    return config.watchdog.enabled == "on" or (config.watchdog.enabled == "auto" and "RANK" in os.environ)


def _processes_here(group: Group) -> list[ProcessId]:
    """Return the processes of the ranks on this node, in the order of the ranks. All ranks must call this."""
    own = ProcessId.own()
    known = torch.tensor([own.pid, own.started], dtype=torch.int64, device=group.device)
    if group.world_size > 1:
        known = group.gather(known, known.new_empty(2 * group.world_size))
    first = group.rank - group.local_rank
    return [ProcessId(*pair) for pair in known.view(-1, 2)[first : first + group.local_world_size].tolist()]


def _write(checkpoints: CheckpointStore, settings: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, and delete those that `checkpoint` does not keep. Runs in the background."""
    with naming(checkpoints.directory):
        checkpoints.save(checkpoint)
    best = checkpoint.state["progress"]["best_step"]
    checkpoints.retain(steps_to_keep(checkpoints.steps(), last=settings.keep_last, every=settings.keep_every, best=best))


def _let_finish(saver: AsyncSaver, heartbeat: Heartbeat) -> None:
    """Wait for a save that still runs at the end of the run. Log its failure."""
    heartbeat.at("save")
    try:
        saver.wait()
    except Exception as error:
        _log.error("%s", error)
