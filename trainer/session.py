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
from typing import Any

import torch
from torch import Tensor, nn

from data_pipeline.errors import ConfigError, GuardError, PreparedDataError, ProjectError
from data_pipeline.manifest import Manifest, read_manifest
from data_pipeline.shards import Rows, ShardError
from data_pipeline.tokenizer import Tokenizer, load_tokenizer
from trainer.accumulation import Accumulation, PlainAccumulation
from trainer.alerts import Alert, Rule, guard_alert
from trainer.attention import Backend, choose_backend, describe_backend
from trainer.bad_data import as_project_error, decide, shared_faults
from trainer.changes import Change, Changes, smaller_micro
from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore, check_space, required_bytes, steps_to_keep
from trainer.config import CheckpointConfig, EvalConfig, TrainConfig
from trainer.convergence import LossMean, early_stop, judge_convergence
from trainer.determinism import configure_determinism, device_name
from trainer.distributed import Group, joined_group
from trainer.ema import WeightAverage
from trainer.evaluate import Evaluation, Grouping, evaluate
from trainer.extension import Extension, RunView, load_extension, seeded_model
from trainer.float8 import convert_to_float8
from trainer.generate import Continuation, Sampling, TextModel
from trainer.guard import Guard
from trainer.layer_stats import LayerObserver
from trainer.ledger import LEDGER, Ledger, LedgerHead
from trainer.loader import RETRY_WAITS_S, GlobalBatch, prefetched_batches
from trainer.memory import MemoryEstimate, PeakMeter, estimate, format_bytes, is_out_of_memory, release_memory
from trainer.metrics import Monitor, StepFacts, StepMetrics, opened_monitor
from trainer.mixture import build_order
from trainer.model import parameters_by_name
from trainer.optim import build_optimizers, check_optimizer, optimizer_tensors, restore_optimizer
from trainer.order import RowOrder
from trainer.parallel import check_parallel, distribute_like, full_tensors, gathered, load_full
from trainer.record import (
    check_identity,
    complete_record,
    identity_of,
    leave_note,
    locked_run,
    note_change,
    open_record,
    recorded_changes,
    recorded_micro,
)
from trainer.report import report_at_end
from trainer.samples import prompts_of, sample_and_score
from trainer.scores import Scores
from trainer.signals import StopRequest, stop_request
from trainer.sizing import with_micro
from trainer.state import Progress
from trainer.step import LossModule, MicroTooLarge, StepResult, TrainingModule, make_scaler, wrap_for_training
from trainer.straggler import DeviceMark, HostMark, OwnTime, OwnTimer, StragglerDetector
from trainer.throughput import describe_mfu, flops_per_token, mfu, peak_flops, rate_kind
from trainer.watchdog import Heartbeat, Patience, clear_heartbeats, watched

__all__ = ["GoBack", "Plan", "RollBack", "Session", "StepAgain", "opened_session", "plan_run", "weights_digest"]

_log = logging.getLogger(__name__)

_LET_GO_S = 0.1


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
    eval: EvalConfig
    """Its patience may end the run before the limits."""

    def finished(self, progress: Progress) -> bool:
        """True once the first limit is reached, or evaluations have not improved for too long."""
        return self.ended_by(progress) is not None

    def ended_by(self, progress: Progress) -> str | None:
        """The first limit that is reached, or why evaluations end the run; none while it goes on."""
        reached = (
            ("limits.steps", self.steps, progress.step),
            ("limits.epochs", self.rows, progress.rows),
            ("limits.tokens", self.targets, progress.targets),
            ("limits.minutes", self.seconds, progress.seconds),
        )
        limit = next((name for name, last, now in reached if last is not None and now >= last), None)
        return limit or early_stop(progress.evaluations, self.eval)


class GoBack(Exception):  # noqa: N818 - a request, no error
    """Training is to go on from an earlier step."""


class RollBack(GoBack):
    """The guard wants to go back to before `step`, and to leave out the positions from `first` to before `end`."""

    def __init__(self, alert: Alert, first: int, end: int) -> None:
        super().__init__(alert.message)
        self.alert, self.step, self.message, self.first, self.end = alert, alert.step, alert.message, first, end


class StepAgain(GoBack):
    """A step is void, because memory or data failed on some rank; it is to be made again, on the same rows."""

    def __init__(self, result: StepResult, facts: StepFacts) -> None:
        super().__init__()
        self.result, self.facts = result, facts


@dataclass
class Session:
    """The parts of a run, as the loop uses them."""

    config: TrainConfig
    """As the run was begun; `changes` says what is different since."""
    group: Group
    manifest: Manifest
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
    observer: LayerObserver
    ledger: Ledger | None
    """What every step was trained on; on rank 0."""
    flops_each: float
    """Floating-point operations for one token."""
    peak: float | None
    """Of one device, in operations a second, where it is known."""
    guard: Guard
    stop: StopRequest
    resumed: Progress
    changes: Changes
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
    grouping: Grouping
    """The groups of the validation text."""
    train_losses: LossMean
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
            first_step=progress.step + 1,
            changes=self.changes,
            shard_of=self.train_rows.shard_of,
        )

    def evaluate(self, progress: Progress) -> Progress:
        """Measures the validation loss and writes samples, both with the average of the weights if there is one."""
        with self.average.swapped_in() if self.average else nullcontext():
            evaluation = self._evaluation(progress.step)
            # A model whose loss is no number has nothing to draw from.
            samples = self._samples(progress.step) if math.isfinite(evaluation.loss) else None
            self.group.smallest(0)  # all wait for rank 0's sample here, where it may take long, and not in the next step
        self.monitor.evaluation(progress.step, evaluation)
        if samples is not None:
            self.monitor.samples(progress.step, *samples)
        after = progress.after_evaluation(evaluation.loss, self.train_losses.take())
        self.monitor.signals(judge_convergence(after.evaluations, self.config.eval).signals)
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
        state = {
            "progress": saved.to_json(),
            "scaler": self.training.scaler.state_dict(),
            "guard": self.guard.to_json(),
            "train_losses": self.train_losses.to_json(),
        }
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
        if verdict.reason is None:
            return
        alert = guard_alert(verdict, result.step, result.loss, result.grad_norm, self.config.guard)
        if verdict.is_news and verdict.action != "rollback":
            self.monitor.alert(alert)
        first, end = facts.progress.rows - len(facts.rows), facts.progress.rows
        if verdict.action == "stop":
            raise GuardError(f"rows at positions {first} to {end - 1}: {verdict.message}")
        if verdict.action == "rollback":
            last = first + self.config.guard.window_steps * self.config.batch.global_rows
            raise RollBack(alert, first, max(end, last))

    def check_void(self, result: StepResult, facts: StepFacts) -> None:
        """Raises StepAgain, on every rank, where a step is void: it changed nothing, nor did those after it."""
        if result.void:
            raise StepAgain(result, facts)

    def go_back(self, request: GoBack) -> Progress:
        """Does what is asked for, and gives the counters to go on from; what it may raise is said there."""
        if isinstance(request, RollBack):
            return self._roll_back(request)
        assert isinstance(request, StepAgain)
        self.observer.forget()
        self._mend(request.result)
        facts = request.facts
        return facts.progress.before_step(start=facts.progress.rows - len(facts.rows), targets=facts.num_targets)

    def _mend(self, result: StepResult) -> None:
        """Changes what made a step fail.

        Raises:
            ConfigError: memory does not suffice, and no smaller micro-batch would have the same meaning.
            ProjectError: data cannot be read, and the policy is to stop, or too much is lost.
        """
        self.heartbeat.expect_slow_steps()
        if result.data_votes:
            faults = {} if result.fault is None else {result.fault.shard: result.fault.error}
            found = shared_faults(faults, self.manifest, self.group)
            self._change(self._quarantine(found, faults, result.step))
        if result.memory_votes:
            self._change(smaller_batches(self.config, self.changes, result.step))
            self._wrap_again(result.step)
        if self.group.is_main:
            reasons = "; ".join(change.reason for change in self.changes.beginning_at(result.step))
            _log.warning("step %d is made again: %s", result.step, reasons)

    def _quarantine(self, found: Mapping[str, tuple[int, int]], faults: Mapping[str, ProjectError], step: int) -> Change:
        known = self.changes.quarantined(step)
        return decide(found, faults, self.config.bad_data, self.manifest, self.group, step=step, known=known)

    def _change(self, change: Change) -> None:
        """Makes a change, and notes it where the next start of the run will find it."""
        self.changes = self.changes.plus(change)
        self.group.on_main(lambda: note_change(self.config.run, change))

    def _wrap_again(self, step: int) -> None:
        """Replaces what a pass that broke off may have left in disorder; weights and optimizer are as they were."""
        training = self.training
        scaler = make_scaler(self.config, self.group.device)
        scaler.load_state_dict(training.scaler.state_dict())
        # DDP's hooks on the weights go with it, and it waits for its exchanges when it goes: see `trainer.distributed`.
        self.training = replace(training, module=training.loss, accumulation=PlainAccumulation(()), scaler=scaler)
        del training
        time.sleep(_LET_GO_S)
        release_memory()
        module, accumulation, self.changes = wrapped(
            self.training.loss, self.config, self.changes, self.group, step, self.manifest, self.training.backend
        )
        self.training = replace(self.training, module=module, accumulation=accumulation)

    def leave_smaller_micro(self, step: int) -> None:
        """Notes, on this rank alone, that the next start of the run is to take smaller micro-batches.

        Raises:
            ConfigError: there are none.
        """
        leave_note(self.config.run, smaller_batches(self.config, self.changes, step), self.group.rank)

    def _roll_back(self, request: RollBack) -> Progress:
        """Restores the newest checkpoint from before a step, and leaves the rows of the request out from then on.

        Raises:
            GuardError: there is no such checkpoint.
        """
        self.finish_saves()
        step = self.group.on_main(lambda: self._newest_before(request))
        checkpoint = self.checkpoints.load(step)
        load_full(self.model, checkpoint.model)
        restored = _restore(checkpoint, self.model, self.training, self.average).leaving_out(request.first, request.end)
        self.train_losses = LossMean(**checkpoint.state["train_losses"])
        self.guard.after_rollback(checkpoint.state["guard"])
        self.observer.forget()
        self.monitor.rewind(step)
        self.monitor.alert(replace(request.alert, step=step))

        def note() -> None:
            assert self.ledger is not None
            self.ledger.rewind(LedgerHead(**checkpoint.state["ledger"]))
            left_out = {"start": request.first, "count": request.end - request.first}
            self.ledger.event("skip", step=step, **left_out, reason=request.message)

        self.group.on_main(note)
        saved = self.save(restored)  # at once, or a crash would forget what is left out
        self.finish_saves()  # else the first save of this step would pass for this one
        return saved

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
            seconds=seconds,
        )
        self.train_losses.add(result.loss)
        metrics = self.monitor.train(metrics)
        self.monitor.layers(self.observer.reading(result.step))
        for change in self.changes.beginning_at(result.step):
            self._announce(change, result.step - 1)
        if self.ledger is not None:
            start = facts.progress.rows - len(facts.rows)
            self.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=result.applied)
        self.monitor.slow_rank(result.step, self.stragglers.observe(result.own_times, seconds))
        return metrics

    def _announce(self, change: Change, step: int) -> None:
        """Shows a change to the user, and puts it into the ledger, after a step."""
        rule: Rule = "quarantine" if change.kind == "quarantine" else "out_of_memory"
        self.monitor.alert(Alert(rule, step, "critical", change.describe(), "log"))
        if self.ledger is not None:
            self.ledger.event(change.kind, step=step, **change.facts())

    def before_exchange(self) -> OwnTime:
        """To be called before a step's first exchange; the time that this rank has worked by itself."""
        self.own_timer.end()
        self.heartbeat.at("reduce")
        return self.own_timer.latest()

    def complete(self, progress: Progress, weights_digest: str, *, stopped: bool) -> None:
        """Writes into the record how the run ended, and tells the sinks."""
        status, ended_by = ("stopped", None) if stopped else ("finished", self.plan.ended_by(progress))
        self.group.on_main(
            lambda: complete_record(
                self.config.run,
                status=status,
                ended_by=ended_by,
                step=progress.step,
                weights_digest=weights_digest,
                alerts=self.monitor.alert_counts,
            )
        )
        self.monitor.finish(status)
        if ended_by is not None and not ended_by.startswith("limits."):
            _log.info("%s", ended_by)

    def raise_alert(self) -> None:
        """Raises GuardError on every rank where an alert whose action is to stop has ended the run, on whichever rank it was."""
        alert = self.monitor.stop_alert
        if self.group.smallest(0 if alert is None else -1) < 0:
            raise GuardError("" if alert is None else alert.message)

    def report_memory(self) -> None:
        """Logs what was estimated and what was taken, side by side."""
        _log.info("%s; measured peak %s", self.memory.describe(), format_bytes(self.meter.bytes()))

    def _evaluation(self, step: int) -> Evaluation:
        """The validation loss after a step; rows that cannot be read are tried again, and then left out or a reason to stop.

        Raises:
            ProjectError: data cannot be read, and the policy is to stop, or too much is lost.
            ConfigError: memory does not suffice, and weights are spread over the ranks.
        """
        tried: set[str] = set()
        while True:
            faults: dict[str, ProjectError] = {}
            evaluation = self._evaluation_without(self.changes.quarantined(step), faults)
            found = shared_faults(faults, self.manifest, self.group)
            if not found:
                return evaluation
            if found.keys() <= tried:
                change = self._quarantine(found, faults, step)
                self._change(change)
                self._announce(change, step)
            tried |= found.keys()
            time.sleep(RETRY_WAITS_S[0])

    def _evaluation_without(self, blank: frozenset[str], faults: dict[str, ProjectError]) -> Evaluation:
        """The validation loss without the rows of some shards, and without those that cannot be read, which go into `faults`."""

        def note(error: ShardError | OSError) -> None:
            shard = self.val_rows.shard_of(error)
            assert shard is not None
            faults[shard] = as_project_error(error)

        rows = self.val_rows.without(blank, note)
        try:
            return evaluate(
                self.training.loss, self.training.backend, rows, self.config, self.group, self.heartbeat.beat, self.grouping
            )
        except Exception as error:
            if self.config.parallel != "fsdp" or not is_out_of_memory(error):
                raise
            raise ConfigError(
                f"an evaluation ran out of memory with {self.config.eval.micro or self.config.batch.micro_rows} rows in a pass; "
                "set eval.micro to fewer, then run the same command again"
            ) from error

    def _samples(self, step: int) -> tuple[list[Continuation], Scores | None] | None:
        """What the model writes after the run's prompts, with its scores, on rank 0; ranks that share the weights have to help."""
        settings = self.config.eval
        rows = self.val_rows.without(self.changes.quarantined(step), lambda _error: None)  # what cannot be read is no prompt
        prompts = self.group.on_main(lambda: prompts_of(settings, rows, self.tokenizer))
        if not prompts or not (self.group.is_main or self.config.parallel == "fsdp"):
            return None
        seed = (self.config.seed + step) % (1 << 63)
        sampling = Sampling(max_tokens=settings.sample_tokens, temperature=settings.sample_temperature, seed=seed)
        source = TextModel(self.model, self.tokenizer, self.config.model.context)
        return gathered(self.training.module, lambda: sample_and_score(source, prompts, sampling, self.config))

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

        def prepare_run() -> tuple[int | None, list[dict[str, Any]]]:
            stack.enter_context(locked_run(config.run))
            newest = checkpoints.newest_verified()
            if newest is not None:
                check_identity(config.run, identity, config.resume.allow_changes)
            check_space(config.run / "checkpoints", required_bytes(_tensor_bytes(config, manifest.vocab_size)))
            clear_heartbeats(config.run)
            changes = recorded_changes(config.run, identity, config.resume.allow_changes)
            open_record(config.run, config, manifest, identity, extension.source, group.world_size, changes)
            return newest, changes.to_json()

        newest, recorded = group.on_main(prepare_run)
        heartbeat = stack.enter_context(_watched(config, group))
        saver = AsyncSaver(partial(_write, checkpoints, config.checkpoint))
        stack.callback(_let_finish, saver, heartbeat)  # before the run's lock goes
        checkpoint = None if newest is None else checkpoints.load(newest)
        model = _model(config, manifest, group, extension, checkpoint)
        training, changes = _training_module(
            model, config, Changes.from_json(recorded), group, newest or 0, manifest, backend, extension
        )
        average = WeightAverage(model, config.ema) if config.ema.decay is not None else None
        resumed = Progress() if checkpoint is None else _restore(checkpoint, model, training, average)
        ledger = stack.enter_context(_opened_ledger(config, manifest, len(train_rows), checkpoint, resumed.step, group))
        if group.is_main and config.log.report:
            stack.callback(report_at_end, config.run)  # once the monitor is closed, however the run ends
        monitor = stack.enter_context(opened_monitor(config, group, last_step=plan.last_step, resume_step=newest))
        tokenizer = load_tokenizer(config.data / "tokenizer")
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
            saver=saver,
            saved_step=newest,
            grouping=Grouping.of(manifest, tokenizer),
            train_losses=LossMean() if checkpoint is None else LossMean(**checkpoint.state["train_losses"]),
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


def wrapped(
    loss: LossModule, config: TrainConfig, changes: Changes, group: Group, step: int, manifest: Manifest, backend: Backend
) -> tuple[nn.Module, Accumulation, Changes]:
    """`wrap_for_training` for the micro-batches of a step, or for smaller ones where these do not fit.

    Raises:
        ConfigError: see `smaller_batches`.
    """
    while True:
        batch = changes.batch(config.batch, step)
        try:
            as_changed = config.model_copy(update={"batch": batch})
            module, accumulation = wrap_for_training(loss, as_changed, group, manifest.row_length, backend)
            return module, accumulation, changes
        except MicroTooLarge:
            change = smaller_batches(config, changes, step)
        changes = changes.plus(change)
        group.on_main(partial(note_change, config.run, change))
        release_memory()


def smaller_batches(config: TrainConfig, changes: Changes, step: int) -> Change:
    """What follows from a lack of memory in a step: smaller micro-batches, and more of them, which give the same gradient.

    Raises:
        ConfigError: there are no smaller ones, or they would be another sum under `reproducibility = elastic`.
    """
    now = changes.batch(config.batch, step).micro_rows
    remedies = "model.activation_checkpointing = full, precision = bf16, parallel = fsdp with more ranks, or a smaller model"
    if config.reproducibility == "elastic":
        raise ConfigError(
            f"step {step}: out of memory with batch.micro = {now}, which reproducibility = elastic fixes, as the bits depend on "
            f"it; begin a run with a smaller batch.micro, or use {remedies}"
        )
    smaller = smaller_micro(now)
    if smaller is None:
        raise ConfigError(f"step {step}: out of memory with a single row in a micro-batch; use {remedies}, or shorter rows")
    return Change(step, f"{now} rows ran out of memory", micro=smaller)


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
        eval=config.eval,
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
