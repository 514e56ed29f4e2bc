"""Everything that a training run holds: built once before the loop, closed once after it."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from data_pipeline.errors import ConfigError, GuardError, PreparedDataError
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.shards import Rows
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.attention import Backend, choose_backend, describe_backend
from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, check_space, required_bytes, steps_to_keep
from trainer.config import CheckpointConfig, TrainConfig
from trainer.determinism import configure_determinism, device_name
from trainer.distributed import Group, joined_group
from trainer.ema import WeightAverage
from trainer.evaluate import Evaluation, evaluate
from trainer.extension import Extension, RunView, load_extension, seeded_model
from trainer.float8 import convert_to_float8
from trainer.generate import Sampling, generate
from trainer.guard import Guard
from trainer.ledger import LEDGER, Ledger, LedgerHead
from trainer.loader import GlobalBatch, prefetched_batches
from trainer.memory import MemoryEstimate, PeakMeter, estimate, format_bytes
from trainer.metrics import JsonLinesSink, Monitor, Sink, StepFacts, StepMetrics, TensorBoardSink, TerminalSink
from trainer.mixture import build_order
from trainer.model import parameters_by_name
from trainer.optim import build_optimizers, check_optimizer, optimizer_tensors, restore_optimizer
from trainer.order import RowOrder
from trainer.parallel import check_parallel, distribute_like, full_tensors, gathered, load_full
from trainer.record import check_identity, identity_of, locked_run, open_record, recorded_micro
from trainer.signals import StopRequest, stop_request
from trainer.sizing import with_micro
from trainer.state import Progress
from trainer.step import LossModule, StepResult, TrainingModule, make_scaler, wrap_for_training
from trainer.straggler import DeviceMark, HostMark, OwnTime, OwnTimer, StragglerDetector
from trainer.throughput import describe_mfu, flops_per_token, mfu, peak_flops, rate_kind
from trainer.watchdog import Heartbeat, Patience, clear_heartbeats, watched

__all__ = ["Plan", "RollBack", "Session", "opened_session", "plan_run", "weights_digest"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """When the run ends, from its limits and the size of the data."""

    steps: int | None
    rows: int | None
    targets: int | None
    seconds: float | None
    decay_steps: int
    """Step at which the learning rate has reached its floor."""
    last_step: int | None
    """The step at which the limits on steps and epochs end the run."""

    def finished(self, progress: Progress) -> bool:
        """True once the first limit is reached."""
        return (
            (self.steps is not None and progress.step >= self.steps)
            or (self.rows is not None and progress.rows >= self.rows)
            or (self.targets is not None and progress.targets >= self.targets)
            or (self.seconds is not None and progress.seconds >= self.seconds)
        )


class RollBack(Exception):  # noqa: N818 - a request, no error
    """The guard wants to go back to before `step`, and to leave out the positions from `first` to before `end`."""

    def __init__(self, step: int, first: int, end: int, message: str) -> None:
        super().__init__(message)
        self.step, self.first, self.end, self.message = step, first, end, message


@dataclass
class Session:
    """The parts of a run, as the loop uses them."""

    config: TrainConfig
    group: Group
    plan: Plan
    train_rows: Rows
    order: RowOrder
    val_rows: Rows
    tokenizer: Tokenizer
    model: nn.Module
    training: TrainingModule
    average: WeightAverage | None
    extension: Extension
    checkpoints: CheckpointStore
    monitor: Monitor
    ledger: Ledger | None
    """What every step was trained on; on rank 0."""
    flops_each: float
    """Floating-point operations for one token."""
    peak: float | None
    """Of one device, in operations a second, where it is known."""
    guard: Guard
    stop: StopRequest
    resumed: Progress
    memory: MemoryEstimate
    """What one rank was expected to need."""
    meter: PeakMeter
    heartbeat: Heartbeat
    """Shows the watchdog and the container's health check what this rank is doing."""
    own_timer: OwnTimer
    stragglers: StragglerDetector
    saver: AsyncSaver
    """Writes checkpoints in the background, on rank 0."""
    saved_step: int | None
    """Step of the newest checkpoint, written or being written; known on every rank."""
    submitted: dict[int, Progress] = field(default_factory=dict)
    """The counters of checkpoints that are being written."""

    def view(self, progress: Progress) -> RunView:
        """What an extension sees of the run."""
        return RunView(
            rank=self.group.rank, world_size=self.group.world_size, config=self.config, model=self.model, progress=progress
        )

    def batches(self, progress: Progress) -> AbstractContextManager[Iterator[GlobalBatch]]:
        """The global batches that come next."""
        config = self.config
        return prefetched_batches(
            self.train_rows,
            config.batch,
            self.group,
            self.order,
            progress.rows,
            config.prefetch,
            with_weights=config.loss.normalise == "sequences",
            with_bounds=self.training.backend == "varlen",
            left_out=progress.left_out,
        )

    def evaluate(self, progress: Progress) -> Progress:
        """Measures the validation loss and writes a sample, both with the average of the weights if there is one."""
        with self.average.swapped_in() if self.average else nullcontext():
            evaluation = gathered(self.training.module, self._evaluation)
            # A model whose loss is no number has nothing to draw from.
            text = gathered(self.training.module, lambda: self._sample(progress.step)) if math.isfinite(evaluation.loss) else None
            self.group.smallest(0)  # all wait for rank 0's sample here, where it may take long, and not in the next step
        self.monitor.evaluation(progress.step, evaluation)
        if text is not None:
            self.monitor.sample(progress.step, text)
        after = progress.after_evaluation(evaluation.loss)
        self.extension.evaluated(self.view(after), evaluation)
        return after

    def save(self, progress: Progress) -> Progress:
        """Hands the whole state over to be written in the background; training waits for the copy, and for an earlier save.

        Raises:
            StorageError: on every rank, where an earlier save failed.
        """
        begun = time.monotonic()
        saved = replace(progress, saved_seconds=progress.seconds)
        weights = full_tensors(parameters_by_name(self.model), self.group)
        moments = full_tensors(optimizer_tensors(self.model, self.training.optimizers), self.group)
        average = full_tensors(self.average.tensors(), self.group) if self.average else {}
        state = {"progress": saved.to_json(), "scaler": self.training.scaler.state_dict(), "guard": self.guard.to_json()}
        self.group.on_main(lambda: self._submit(Checkpoint(saved.step, weights, moments, state, average)))
        self.saved_step = saved.step
        self.submitted[saved.step] = saved
        self.monitor.saving(saved.step, time.monotonic() - begun)
        return saved

    def judge(self, result: StepResult, facts: StepFacts) -> None:
        """Asks the guard about a step.

        Raises:
            GuardError: training is to stop.
            RollBack: training is to go back to a checkpoint from before this step.
        """
        verdict = self.guard.judge(result.step, result.loss, result.grad_norm)
        if verdict.is_news and verdict.action != "rollback":
            self.monitor.alert(result.step, verdict.message)
        first, end = facts.progress.rows - len(facts.rows), facts.progress.rows
        if verdict.action == "stop":
            raise GuardError(f"rows at positions {first} to {end - 1}: {verdict.message}")
        if verdict.action == "rollback":
            last = first + self.config.guard.window_steps * self.config.batch.global_rows
            raise RollBack(result.step, first, max(end, last), verdict.message)

    def roll_back(self, request: RollBack) -> Progress:
        """Restores the newest checkpoint from before a step, and leaves the rows of the request out from then on.

        Raises:
            GuardError: there is no such checkpoint.
        """
        self.finish_saves()
        step = self.group.on_main(lambda: self._newest_before(request))
        checkpoint = self.checkpoints.load(step)
        load_full(self.model, checkpoint.model)
        restored = _restore(checkpoint, self.model, self.training, self.average).leaving_out(request.first, request.end)
        self.guard.after_rollback(checkpoint.state["guard"])
        self.monitor.rewind(step)
        self.monitor.alert(step, request.message)

        def note() -> None:
            assert self.ledger is not None
            self.ledger.rewind(LedgerHead(**checkpoint.state["ledger"]))
            left_out = {"start": request.first, "count": request.end - request.first}
            self.ledger.event("skip", step=step, **left_out, reason=request.message)

        self.group.on_main(note)
        return self.save(restored)  # at once, or a crash would forget what is left out

    def _newest_before(self, request: RollBack) -> int:
        """The newest checkpoint that verifies. It is older than the step, as every step is judged before the next save."""
        newest = self.checkpoints.newest_verified()
        if newest is None:
            raise GuardError(f"{request.message} There is no checkpoint from before this step to go back to")
        return newest

    def follow_saves(self, result: StepResult) -> None:
        """Takes note of what rank 0 said of its saves in the report of a step.

        Raises:
            StorageError: on every rank, where a save failed.
        """
        if result.save_failed:
            self.group.on_main(self.saver.raise_if_failed)
        self._acknowledge(result.acknowledged_step)

    def finish_saves(self) -> None:
        """Waits for the save that is running; raises on every rank what it failed with."""

        def wait() -> int:
            self.saver.wait()
            return self.saver.acknowledged_step

        self._acknowledge(self.group.on_main(wait))

    def _acknowledge(self, newest: int) -> None:
        for step in sorted(step for step in self.submitted if step <= newest):
            self.extension.saved(self.view(self.submitted.pop(step)), step, self.checkpoints.path(step))

    def weights_digest(self) -> str:
        """sha256 over all weights in the order of their names, as fp32 in little-endian order; the same on every rank."""
        weights = full_tensors(parameters_by_name(self.model), self.group)
        return self.group.on_main(lambda: weights_digest(weights))

    def report(self, result: StepResult, facts: StepFacts, seconds: float) -> StepMetrics:
        """Hands the numbers of a step, which took so many seconds, to the sinks, and shows that this rank is alive."""
        tokens_per_s = facts.num_targets / seconds
        metrics = StepMetrics(
            step=result.step,
            last_step=self.plan.last_step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=facts.learning_rate,
            targets=facts.progress.targets,
            tokens_per_s=tokens_per_s,
            mfu=mfu(tokens_per_s, self.flops_each, self.peak, self.group.world_size),
            loader_wait_s=facts.loader_wait_s,
        )
        self.monitor.train(metrics)
        if self.ledger is not None:
            start = facts.progress.rows - len(facts.rows)
            applied = not self.guard.thresholds(result.step).skips(result.loss, result.grad_norm)
            self.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=applied)
        if (slow := self.stragglers.observe(result.own_times, seconds)) and self.group.is_main:
            _log.warning("step %d: %s", result.step, slow.describe())
        return metrics

    def before_exchange(self) -> OwnTime:
        """To be called before a step's first exchange; the time that this rank has worked by itself."""
        self.own_timer.end()
        self.heartbeat.at("reduce")
        return self.own_timer.latest()

    def report_memory(self) -> None:
        """Logs what was estimated and what was taken, side by side."""
        _log.info("%s; measured peak %s", self.memory.describe(), format_bytes(self.meter.bytes()))

    def _evaluation(self) -> Evaluation:
        return evaluate(self.training.loss, self.training.backend, self.val_rows, self.config, self.group, self.heartbeat.beat)

    def _sample(self, step: int) -> str | None:
        """The sample's text, on rank 0; ranks that share the weights have to help."""
        settings = self.config.eval
        if not settings.sample_tokens or not (self.group.is_main or self.config.parallel == "fsdp"):
            return None
        sampling = Sampling(
            max_tokens=settings.sample_tokens, temperature=settings.sample_temperature, seed=self.config.seed + step
        )
        pieces = generate(self.model, self.tokenizer, settings.prompt, sampling, self.config.model.context)
        return settings.prompt + "".join(pieces)

    def _submit(self, checkpoint: Checkpoint) -> None:
        assert self.ledger is not None
        _check_finite(checkpoint)
        self.ledger.sync()  # before a checkpoint names its head
        self.saver.submit(replace(checkpoint, state={**checkpoint.state, "ledger": self.ledger.head.to_json()}))


@contextmanager
def opened_session(config: TrainConfig) -> Iterator[Session]:
    """Checks the settings against data and machine, builds all parts, and restores the newest checkpoint if there is one.

    Raises:
        ConfigError: the settings do not fit the data, the machine or the run that is there.
        PreparedDataError: the data is damaged or missing.
        CheckpointError: checkpoints are there, and none is intact.
    """
    configure_determinism(config)
    extension = load_extension(config.extension)
    with ExitStack() as stack:
        stop = stack.enter_context(stop_request())
        group = stack.enter_context(joined_group(config.device))
        logging.basicConfig(level=logging.INFO if group.is_main else logging.WARNING, format="%(message)s")
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
        config = with_micro(config, manifest, group, backend, extension, group.on_main(lambda: recorded_micro(config.run)))
        _check_fit(config, manifest, len(train_rows), len(val_rows), group)
        check_parallel(config, group)
        check_optimizer(config)
        plan = plan_run(config, manifest, len(train_rows))
        order = build_order(config.seed, train_rows, manifest.sources, config.mixture.weights)
        identity = identity_of(
            config, manifest, group, decay_steps=plan.decay_steps, backend=backend, extension_digest=extension.digest
        )
        checkpoints = CheckpointStore(config.run / "checkpoints")

        def prepare_run() -> int | None:
            stack.enter_context(locked_run(config.run))
            newest = checkpoints.newest_verified()
            if newest is not None:
                check_identity(config.run, identity, config.resume.allow_changes)
            check_space(config.run / "checkpoints", required_bytes(_tensor_bytes(config, manifest.vocab_size)))
            clear_heartbeats(config.run)
            open_record(config.run, config, manifest, identity, extension.source, group.world_size)
            return newest

        newest = group.on_main(prepare_run)
        heartbeat = stack.enter_context(_watched(config, group))
        saver = AsyncSaver(partial(_write, checkpoints, config.checkpoint))
        stack.callback(_let_finish, saver, heartbeat)  # before the run's lock goes
        checkpoint = None if newest is None else checkpoints.load(newest)
        model = _model(config, manifest, group, extension, checkpoint)
        training = _training_module(model, config, group, manifest.row_length, backend, extension)
        average = WeightAverage(model, config.ema) if config.ema.decay is not None else None
        resumed = Progress() if checkpoint is None else _restore(checkpoint, model, training, average)
        ledger = stack.enter_context(_opened_ledger(config, manifest, len(train_rows), checkpoint, resumed.step, group))
        monitor = Monitor(_sinks(config, plan, newest) if group.is_main else ())
        stack.callback(monitor.close)
        session = Session(
            config=config,
            group=group,
            plan=plan,
            train_rows=train_rows,
            order=order,
            val_rows=val_rows,
            tokenizer=load_tokenizer(config.data / "tokenizer"),
            model=model,
            training=training,
            average=average,
            extension=extension,
            checkpoints=checkpoints,
            monitor=monitor,
            ledger=ledger,
            flops_each=flops_per_token(config.model, manifest.vocab_size, manifest.row_length),
            peak=peak_flops(device_name(group.device), rate_kind(config.precision, tf32=config.tf32)),
            guard=_guard(config, checkpoint),
            stop=stop,
            resumed=resumed,
            memory=estimate(
                config,
                manifest.vocab_size,
                manifest.row_length,
                group.world_size,
                config.batch.micro_rows,
                backend,
                group.device.type,
            ),
            meter=meter,
            heartbeat=heartbeat,
            own_timer=OwnTimer(DeviceMark if group.device.type == "cuda" else HostMark),
            stragglers=StragglerDetector(),
            saver=saver,
            saved_step=newest,
        )
        _introduce(session, manifest, continued=newest is not None)
        yield session


def _introduce(session: Session, manifest: Manifest, *, continued: bool) -> None:
    config, device = session.config, session.group.device
    _log.info("%s", _describe(session, manifest, continued=continued))
    _log.info("%s; %s", session.order.description, describe_backend(session.training.backend))
    if session.peak is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        _log.info("%s", describe_mfu(None, gpu, rate_kind(config.precision, tf32=config.tf32)))


def _model(config: TrainConfig, manifest: Manifest, group: Group, extension: Extension, checkpoint: Checkpoint | None) -> nn.Module:
    """The model on its device, with the checkpoint's weights or fresh ones."""
    model = seeded_model(extension, config.model, manifest.vocab_size, config.seed)
    if config.parallel == "ddp" or group.world_size == 1:
        model.to(group.device)  # else each part goes there when it is cut
    if config.precision == "float8":
        convert_to_float8(model, group.device)
    if checkpoint is not None:
        load_full(model, checkpoint.model)
    return model


def _check_finite(checkpoint: Checkpoint) -> None:
    """Refuses to save weights from which no training can go on."""
    for name, weight in checkpoint.model.items():
        if not weight.isfinite().all():
            raise GuardError(
                f"step {checkpoint.step}: weight {name} is not finite, so nothing is saved; the last checkpoint is intact. Lower "
                "optim.lr, or look for what changes weights beside the optimizer"
            )


def _write(checkpoints: CheckpointStore, settings: CheckpointConfig, checkpoint: Checkpoint) -> None:
    """Saves, and deletes what need not be kept; in the background."""
    checkpoints.save(checkpoint)
    best = checkpoint.state["progress"]["best_step"]
    checkpoints.retain(steps_to_keep(checkpoints.steps(), last=settings.keep_last, every=settings.keep_every, best=best))


def _watched(config: TrainConfig, group: Group) -> AbstractContextManager[Heartbeat]:
    settings = config.watchdog
    return watched(
        config.run,
        Patience(settings.stall_s, settings.slow_s),
        rank=group.rank,
        local_rank=group.local_rank,
        local_world_size=group.local_world_size,
        enabled=settings.enabled == "on" or (settings.enabled == "auto" and "RANK" in os.environ),
    )


def _let_finish(saver: AsyncSaver, heartbeat: Heartbeat) -> None:
    """Waits for a save that is still running when the run ends, for whatever reason it does."""
    heartbeat.at("save")
    try:
        saver.wait()
    except Exception as error:
        _log.error("%s", error)


@contextmanager
def _opened_ledger(
    config: TrainConfig, manifest: Manifest, num_rows: int, checkpoint: Checkpoint | None, step: int, group: Group
) -> Iterator[Ledger | None]:
    """The ledger up to the checkpoint, on rank 0; an error there is raised on every rank."""
    head = None if checkpoint is None else LedgerHead(**checkpoint.state["ledger"])
    with ExitStack() as stack:

        def open_on_main() -> None:
            ledger = stack.enter_context(closing(Ledger(config.run / LEDGER, head)))
            weights = config.mixture.weights
            ledger.order(step=step, seed=config.seed, data=manifest.root_digest, rows=num_rows, mixture=weights)
            opened.append(ledger)

        opened: list[Ledger] = []
        group.on_main(open_on_main)
        yield opened[0] if opened else None


def _training_module(
    model: nn.Module, config: TrainConfig, group: Group, row_length: int, backend: Backend, extension: Extension
) -> TrainingModule:
    loss = LossModule(model, config.loss, extension.own_loss)
    module, accumulation = wrap_for_training(loss, config, group, row_length, backend)
    return TrainingModule(
        loss=loss,
        module=module,
        accumulation=accumulation,
        scaler=make_scaler(config, group.device),
        backend=backend,
        optimizers=build_optimizers(model, config.optim),
    )


def _tensor_bytes(config: TrainConfig, vocab_size: int) -> list[int]:
    """Of the weights, the optimizer's state and the average in a checkpoint; a model of one's own may differ."""
    whole = estimate(config, vocab_size, config.model.context, 1, 1)
    return [whole.weights, whole.optimizer, whole.average]


def _describe(session: Session, manifest: Manifest, *, continued: bool) -> str:
    config, group = session.config, session.group
    num_weights = sum(parameter.numel() for parameter in parameters_by_name(session.model).values())
    return (
        f"{f'resuming {config.run} at step {session.resumed.step}' if continued else f'training in {config.run}'}  "
        f"{num_weights / 1e6:.2f}M weights, vocabulary {manifest.vocab_size}, {len(session.train_rows)} training and "
        f"{len(session.val_rows)} validation rows of {manifest.row_length} tokens, "
        f"{group.world_size} rank{'s' * (group.world_size > 1)} on {group.device.type}, {config.precision}"
    )


def plan_run(config: TrainConfig, manifest: Manifest, num_rows: int) -> Plan:
    """The end of the run in every unit, and the length of the learning-rate schedule.

    A limit in tokens becomes steps through the mean number of targets in a row, for the schedule only; the run itself ends
    by its count.
    """
    limits, batch_rows = config.limits, config.batch.global_rows
    epoch_rows = None if limits.epochs is None else math.ceil(limits.epochs * num_rows)
    row_targets = sum(shard.targets for shard in manifest.shards if shard.split == "train") / num_rows
    counted = [limits.steps, None if epoch_rows is None else math.ceil(epoch_rows / batch_rows)]
    certain = [steps for steps in counted if steps is not None]
    estimated = [] if limits.tokens is None else [max(1, math.ceil(limits.tokens / row_targets / batch_rows))]
    decay_steps = config.schedule.decay_steps or min(certain + estimated)
    if config.schedule.kind != "constant" and config.schedule.warmup_steps >= decay_steps:
        raise ConfigError(
            f"schedule.warmup_steps = {config.schedule.warmup_steps}, but the learning rate is to reach its "
            f"floor at step {decay_steps}; warm up for fewer steps, train longer, or set schedule.decay_steps"
        )
    return Plan(
        steps=limits.steps,
        rows=epoch_rows,
        targets=limits.tokens,
        seconds=None if limits.minutes is None else limits.minutes * 60,
        decay_steps=decay_steps,
        last_step=min(certain) if certain and limits.tokens is None else None,
    )


def weights_digest(weights: Mapping[str, Tensor]) -> str:
    """sha256 over all weights in the order of their names, as fp32 in little-endian order."""
    digest = hashlib.sha256()
    for _, weight in sorted(weights.items()):
        digest.update(weight.detach().cpu().float().numpy().astype("<f4", copy=False).tobytes())
    return f"sha256:{digest.hexdigest()}"


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


def _restore(checkpoint: Checkpoint, model: nn.Module, training: TrainingModule, average: WeightAverage | None) -> Progress:
    parameters = parameters_by_name(model)
    restore_optimizer(model, training.optimizers, distribute_like(parameters, checkpoint.optimizer))
    if average is not None:
        average.restore(distribute_like(parameters, checkpoint.average))
    training.scaler.load_state_dict(checkpoint.state["scaler"])
    return Progress.from_json(checkpoint.state["progress"])


def _guard(config: TrainConfig, checkpoint: Checkpoint | None) -> Guard:
    guard = Guard(config.guard, scaled=config.precision == "fp16")
    if checkpoint is not None:
        guard.from_json(checkpoint.state["guard"])
    return guard


def _sinks(config: TrainConfig, plan: Plan, resume_step: int | None) -> list[Sink]:
    run = config.run
    return [
        JsonLinesSink(run / "metrics.jsonl", resume_step),
        TensorBoardSink(run / "tensorboard", resume_step, config.log.every_steps),
        TerminalSink(resume_step or 0, plan.last_step, config.log.every_steps),
    ]
