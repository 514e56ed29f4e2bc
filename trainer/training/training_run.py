"""Everything that a training run holds, as the loop uses it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from torch import nn

from common.errors import ConfigError, GuardError, ProjectError
from common.text import format_bytes
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows, ShardError
from data_pipeline.tokenizer import Tokenizer
from trainer.checkpoint import AsyncSaver, Checkpoint, CheckpointStore
from trainer.checkpoint.weights import check_finite, weights_digest
from trainer.config import TrainConfig
from trainer.data.adjustments import Change, Changes
from trainer.data.bad_shards import as_project_error, decide, shared_faults
from trainer.data.batch import GlobalBatch
from trainer.data.loader import RETRY_WAITS_S, prefetched_batches
from trainer.data.order import RowOrder
from trainer.distributed.group import LET_GO_S, Group
from trainer.distributed.replica_check import ReplicaCheck
from trainer.distributed.stragglers import OwnTime, OwnTimer, StragglerDetector
from trainer.evaluation.evaluate import EvaluationStopped, evaluate
from trainer.evaluation.results import Evaluation
from trainer.evaluation.tally import Grouping
from trainer.extensions.hooks import Extension, RunView
from trainer.health.alerts import Alert, Rule, guard_alert
from trainer.health.convergence import LossMean, judge_convergence
from trainer.health.guard import Guard
from trainer.inference.samples import prompts_of, sample_and_score
from trainer.inference.text_model import Continuation, Sampling, TextModel
from trainer.inference.text_scores import Scores
from trainer.machine.memory import PeakMeter, is_out_of_memory, release_memory
from trainer.machine.peak_rates import mfu
from trainer.metrics import Monitor, StepFacts, StepMetrics
from trainer.metrics.layers import LayerObserver
from trainer.model.memory_estimate import MemoryEstimate
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import optimizer_tensors, restore_optimizer
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.accumulation import PlainAccumulation
from trainer.parallel.fsdp import distribute_like, full_tensors, gathered, load_full
from trainer.parallel.wrapping import TrainingModule
from trainer.run.events import Known
from trainer.run.ledger import Ledger, LedgerHead
from trainer.run.limits import Plan
from trainer.run.progress import Progress
from trainer.run.record import leave_note, note_change
from trainer.run.signals import StopRequest
from trainer.training.ending import Ending
from trainer.training.step import StepResult, make_scaler
from trainer.training.wrapped_model import smaller_batches, wrapped
from trainer.watchdog.watch import Heartbeat

__all__ = ["GoBack", "RollBack", "Session", "StepAgain", "known_to", "restore"]

_log = logging.getLogger(__name__)


class GoBack(Exception):  # noqa: N818 - a request, no error
    """Training is to go on from an earlier step."""


class RollBack(GoBack):
    """The guard wants to go back to before the alert's step, and to leave out the positions from `first` to before `end`."""

    def __init__(self, alert: Alert, first: int, end: int) -> None:
        super().__init__(alert.message)
        self.alert, self.first, self.end = alert, first, end


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
    replicas: ReplicaCheck
    """Compares the weights of the ranks."""
    saver: AsyncSaver
    """Writes checkpoints in the background, on rank 0."""
    saved_step: int | None
    """Step of the newest checkpoint, written or being written; known on every rank."""
    grouping: Grouping
    """The groups of the validation text."""
    train_losses: LossMean
    ending: Ending
    """What is told of the run's end."""
    submitted: dict[int, Progress] = field(default_factory=dict)
    """The counters of checkpoints that are being written."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop, by a signal or by an alert."""
        return self.stop.signal_name is not None or self.monitor.stop_alert is not None

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
        """Measures the validation loss and writes samples, both with the average of the weights if there is one.

        Nothing comes of it where a rank is asked to stop meanwhile: the run evaluates when it goes on.
        """
        try:
            with self.average.swapped_in() if self.average else nullcontext():
                evaluation = self._evaluation(progress.step)
                # A model whose loss is no number has nothing to draw from.
                samples = self._samples(progress.step) if math.isfinite(evaluation.loss) else None
                self.group.smallest(0)  # all wait for rank 0's sample here, where it may take long, and not in the next step
        except EvaluationStopped:
            return progress
        self.monitor.evaluation(progress.step, evaluation)
        if samples is not None:
            self.monitor.samples(progress.step, *samples)
        after = progress.after_evaluation(evaluation.loss, self.train_losses.take())
        self.monitor.signals(judge_convergence(after.evaluations, self.config.eval).signals)
        self.extension.evaluated(self.view(after), evaluation)
        self.saved_step = None  # what is saved does not know of this evaluation
        return after

    def save(self, progress: Progress) -> Progress:
        """Hands the whole state over to be written in the background; training waits for the copy, and for an earlier save.

        Raises:
            StorageError: on every rank, where an earlier save failed.
            GuardError: the weights of the ranks differ.
        """
        begun = time.monotonic()
        self.replicas.check(progress.step)
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
        self.replicas.drop_pending()
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
        # DDP's hooks on the weights go with it, and it waits for its exchanges when it goes: see `trainer.distributed.group`.
        self.training = replace(training, module=training.loss, accumulation=PlainAccumulation(()), scaler=scaler)
        del training
        time.sleep(LET_GO_S)
        release_memory()
        module, accumulation, changes = wrapped(
            self.training.loss, self.config, self.changes, self.group, step, self.manifest, self.training.backend
        )
        for change in changes.made[len(self.changes.made) :]:
            self._change(change)
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
        restored = restore(checkpoint, self.model, self.training, self.average).leaving_out(request.first, request.end)
        self.train_losses = LossMean(**checkpoint.state["train_losses"])
        self.guard.after_rollback(checkpoint.state["guard"])
        self.observer.forget()
        self.replicas.forget(step)
        self.monitor.rewind(replace(known_to(checkpoint), rollbacks=None))
        self.monitor.alert(replace(request.alert, step=step))

        def note() -> None:
            assert self.ledger is not None
            self.ending.step = step
            self.ledger.rewind(LedgerHead(**checkpoint.state["ledger"]))
            left_out = {"start": request.first, "count": request.end - request.first}
            self.ledger.event("skip", step=step, **left_out, reason=request.alert.message)

        self.group.on_main(note)
        saved = self.save(restored)  # at once, or a crash would forget what is left out
        self.finish_saves()  # else the first save of this step would pass for this one
        return saved

    def _newest_before(self, request: RollBack) -> int:
        """The newest checkpoint that verifies. It is older than the step, as every step is judged before the next save."""
        newest = self.checkpoints.newest_verified()
        if newest is None:
            message = f"{request.alert.message}. There is no checkpoint from before this step to go back to, so training stops"
            self.monitor.alert(replace(request.alert, message=message, action="stop"))
            raise GuardError(message)
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
            self._announce(change, result.step, after=result.step - 1)
        if self.ledger is not None:
            start = facts.progress.rows - len(facts.rows)
            self.ledger.commit(step=result.step, start=start, rows=facts.rows, targets=facts.num_targets, applied=result.applied)
        self.ending.step = result.step
        self.monitor.slow_rank(result.step, self.stragglers.observe(result.own_times, seconds))
        return metrics

    def _announce(self, change: Change, step: int, *, after: int) -> None:
        """Shows a change to the user, at the step for which it was made, and puts it into the ledger after the last step."""
        rule: Rule = "quarantine" if change.kind == "quarantine" else "out_of_memory"
        self.monitor.alert(Alert(rule, step, "critical", change.describe(), "log"))
        if self.ledger is not None:
            self.ledger.event(change.kind, step=after, **change.facts())

    def before_exchange(self) -> OwnTime:
        """To be called before a step's first exchange; the time that this rank has worked by itself."""
        self.own_timer.end()
        self.heartbeat.at("reduce")
        return self.own_timer.latest()

    def complete(self, progress: Progress, weights_digest: str, *, stopped: bool) -> None:
        """Writes into the record how the run ended, and tells the sinks."""
        status, ended_by = ("stopped", self._stopped_by()) if stopped else ("finished", self.plan.ended_by(progress))
        self.ending.step, self.ending.alerts = progress.step, self.monitor.alert_counts

        def note() -> None:
            self.monitor.end(progress.step, status, ended_by)
            self.ending.record(status, ended_by, weights_digest)

        self.group.on_main(note)
        self.monitor.finish(status)
        if status == "finished" and ended_by is not None and not ended_by.startswith("limits."):
            _log.info("%s", ended_by)

    def _stopped_by(self) -> str:
        """What asked the run to stop, as far as this rank knows."""
        alert = self.monitor.stop_alert
        return alert.message if alert is not None else self.stop.signal_name or "a signal to another rank, or an alert there"

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
                self._announce(change, step, after=step)
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
                self.training.loss,
                self.training.backend,
                rows,
                self.config,
                self.group,
                self.heartbeat.beat,
                self.grouping,
                lambda: self.stop_requested,
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
        check_finite(checkpoint)
        self.ledger.sync()  # before a checkpoint names its head
        self.monitor.sync()
        self.saver.submit(replace(checkpoint, state={**checkpoint.state, "ledger": self.ledger.head.to_json()}))


def known_to(checkpoint: Checkpoint) -> Known:
    """What the state of a checkpoint knows of what the run has told."""
    progress = Progress.from_json(checkpoint.state["progress"])
    evaluated = progress.evaluated_step == progress.step
    return Known(progress.step, evaluated=evaluated, rollbacks=checkpoint.state["guard"]["rollbacks"])


def restore(checkpoint: Checkpoint, model: nn.Module, training: TrainingModule, average: WeightAverage | None) -> Progress:
    """Puts the optimizer's state, the average of the weights and the scaler back; returns the counters."""
    parameters = parameters_by_name(model)
    restore_optimizer(model, training.optimizers, distribute_like(parameters, checkpoint.optimizer))
    if average is not None:
        average.restore(distribute_like(parameters, checkpoint.average))
    if scaler := checkpoint.state["scaler"]:  # it is empty where the run was not in fp16 before
        training.scaler.load_state_dict(scaler)
    return Progress.from_json(checkpoint.state["progress"])
