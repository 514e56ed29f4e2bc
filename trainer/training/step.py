"""One optimizer step: forward and backward over the micro-batches, clipping, update; nothing in it waits for the device.

The numbers of a step travel to the host while the device goes on, and are read one step later (`StepResults`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ProjectError
from trainer.config import TrainConfig
from trainer.data.batch import DataFault, GlobalBatch, share_of_rank
from trainer.distributed.group import Group
from trainer.distributed.stragglers import OwnTime
from trainer.health.guard import Thresholds
from trainer.machine.determinism import seed_micro_batch
from trainer.machine.memory import is_out_of_memory, release_memory
from trainer.metrics.layers import StepObserver
from trainer.model.forward import forward_pass
from trainer.optim.optimizers import step_unless
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.wrapping import TrainingModule

__all__ = ["OutOfMemoryAloneError", "PendingStep", "StepResult", "StepResults", "make_scaler", "train_step"]

_log = logging.getLogger(__name__)
_NO_LIMITS = Thresholds()
_NUM_NOTES = 7
_STOP, _SECONDS, _NORM, _SAVE_FAILED, _ACKNOWLEDGED, _MEMORY, _DATA = range(_NUM_NOTES)
"""Places of the numbers of a step's report that come before the ranks' own times and the losses of micro-batches."""


class OutOfMemoryAloneError(ProjectError):
    """This rank ran out of memory where it cannot go on with the others, so that the group has to be started again."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"out of memory in step {step}, where a rank cannot go on with the others; run the same command again: it goes on from "
            f"the newest checkpoint, with smaller micro-batches from step {step} on"
        )
        self.step = step


@dataclass(frozen=True)
class StepResult:
    """What one step reports; the same on every rank."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the targets (or sequences) of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    stop_votes: int
    """Ranks that were asked to stop."""
    seconds: float
    """Training time of rank 0 before this step."""
    save_failed: bool
    """A checkpoint could not be written in the background."""
    acknowledged_step: int
    """The newest checkpoint that is on the device, as rank 0 knew before this step; -1: none since the start."""
    own_times: tuple[OwnTime, ...]
    """Of each rank: in this step, or in the newest that its device had finished before."""
    applied: bool
    """The update was made, as the device decided."""
    memory_votes: int
    """Ranks that ran out of memory."""
    data_votes: int
    """Ranks that could not read their rows."""
    fault: DataFault | None
    """What this rank could not read; of all that is here, this alone is not the same on every rank."""

    @property
    def void(self) -> bool:
        """A rank failed, so that nothing of the step counts and it has to be made again."""
        return self.memory_votes > 0 or self.data_votes > 0


class PendingStep:
    """The numbers of a step, on their way from the device.

    Args:
        step: its number.
        report: what was added up over the ranks; see `_report`.
        skip: on the device: 1 where the update was withheld, else 0.
        void: on the device: true where a rank failed, in this step or in one before that is still on its way.
        batch: this rank's part of the global batch.
        num_ranks: of the group.
        ran_out: this rank itself ran out of memory, in this step or in one before that is still on its way.
    """

    def __init__(
        self, step: int, report: Tensor, skip: Tensor, void: Tensor, batch: GlobalBatch, num_ranks: int, *, ran_out: bool = False
    ) -> None:
        self.skip, self.void, self.ran_out = skip, void, ran_out
        self._step = step
        self._normaliser = batch.normaliser
        self._fault = batch.fault
        self._num_ranks = num_ranks
        self._arrived: torch.cuda.Event | None = None
        numbers = torch.cat([skip.to(report.dtype).reshape(1), report])
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._numbers = numbers

    def result(self) -> StepResult:
        """Waits for the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        skip, votes, seconds, grad_norm, save_failed, acknowledged_step, memory_votes, data_votes, *rest = self._numbers.tolist()
        own_s, losses = rest[: 2 * self._num_ranks], rest[2 * self._num_ranks :]
        return StepResult(
            step=self._step,
            loss=math.fsum(losses) / self._normaliser,
            grad_norm=grad_norm,
            stop_votes=int(votes),
            seconds=seconds,
            save_failed=bool(save_failed),
            acknowledged_step=int(acknowledged_step),
            own_times=tuple(OwnTime(*pair) for pair in zip(own_s[::2], own_s[1::2], strict=True)),
            applied=not skip,
            memory_votes=int(memory_votes),
            data_votes=int(data_votes),
            fault=self._fault,
        )


FactsT = TypeVar("FactsT")


class StepResults(Generic[FactsT]):
    """Results in the order of the steps, each read `lag` steps after its own, so that the host is ahead of the device."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._pending: deque[tuple[PendingStep, FactsT]] = deque()

    @property
    def newest(self) -> PendingStep | None:
        """The last step whose numbers have not been read."""
        return self._pending[-1][0] if self._pending else None

    def add(self, pending: PendingStep, facts: FactsT) -> None:
        """Takes the next step, with what the host knows of it."""
        self._pending.append((pending, facts))

    def due(self, *, everything: bool = False) -> Iterator[tuple[StepResult, FactsT]]:
        """The results that are to be read now, or all that are left."""
        while len(self._pending) > (0 if everything else self._lag):
            pending, facts = self._pending.popleft()
            yield pending.result(), facts


def make_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """Scales fp16 losses so that small gradients do not vanish; does nothing in other precisions."""
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    scaler.scale(torch.zeros((), device=device))  # its state lies on the device from here on, and not from the first step on
    return scaler


def train_step(
    training: TrainingModule,
    batch: GlobalBatch,
    config: TrainConfig,
    group: Group,
    *,
    step: int,
    stop_requested: bool,
    seconds: float,
    save_failed: bool = False,
    acknowledged_step: int = -1,
    limits: Thresholds = _NO_LIMITS,
    before_exchange: Callable[[], OwnTime] = lambda: OwnTime(0.0, 0.0),
    after: PendingStep | None = None,
    observer: StepObserver | None = None,
) -> PendingStep:
    """Updates the weights by one global batch, unless its loss or gradient is not finite, or outside of the limits.

    A rank that runs out of memory, or whose rows could not be read, still takes part in every exchange, and says so in the
    report. All ranks then withhold the update, and those of the steps that are under way already, so that the state is as it was
    before the step. Nobody waits for that, and nobody is left waiting.

    The loss of every micro-batch is a sum, divided by the targets of the whole global batch before backward, so that the
    gradient is that of the mean however the batch is cut. Each micro-batch's loss has a place of its own in the report; the
    places of other ranks are zero, and adding zero changes no bit.

    Args:
        training: what is trained.
        batch: this rank's part of the global batch.
        config: the run's settings.
        group: the ranks.
        step: number of this step, from 1.
        stop_requested: true where this rank was asked to stop.
        seconds: this rank's training time so far.
        save_failed: true where this rank could not write a checkpoint.
        acknowledged_step: the newest checkpoint that this rank has written.
        limits: of loss and gradient norm, beyond which the update is withheld.
        before_exchange: called at the last moment at which this rank cannot have waited for another; what it gives is reported.
        after: the step before, where its numbers have not been read yet.
        observer: looks at the gradients before they are clipped, and at the weights before and after the update. All ranks have
            one, or none has.

    Raises:
        OutOfMemoryAloneError: this rank ran out of memory, and cannot do its part of the exchanges.
    """
    scaler_before = [value.clone() for value in _tensors_of(training.scaler)]
    losses = torch.zeros(batch.num_micro_batches, dtype=torch.float64, device=group.device)
    gradient, begun = None, after is None or not after.ran_out
    if begun:
        with _alone(step):
            training.accumulation.begin()
        gradient = _attempt(training, batch, config, group, step, losses, before_exchange, observer)
    if gradient is None:  # not inside `_attempt`, where the error still holds the tensors of the pass that broke off
        _join(training.accumulation, len(share_of_rank(batch.num_micro_batches, group)), step, begun=begun)
    report = group.sum(
        _report(
            group,
            losses,
            gradient,
            stop_requested=stop_requested,
            seconds=seconds,
            save_failed=save_failed,
            acknowledged_step=acknowledged_step,
            lacks_data=batch.fault is not None,
        )
    )
    void = report[_MEMORY] + report[_DATA] > 0
    if after is not None:
        void = void | after.void
    loss = report[len(report) - len(losses) :].sum() / batch.normaliser
    skip = (void | ~_is_healthy(loss, report[_NORM], limits)).float()
    if gradient is not None:
        with _alone(step):  # some weights would be updated and some not
            step_unless(training.optimizers, skip)
        if observer is not None:
            observer.after_update(step)
        training.scaler.update()
        for now, before in zip(_tensors_of(training.scaler), scaler_before, strict=True):
            now.copy_(torch.where(void, before, now))
    return PendingStep(step, report, skip, void, batch, group.world_size, ran_out=gradient is None)


@dataclass(frozen=True)
class _Gradient:
    """The gradient of the global batch is in the parameters, clipped."""

    norm: Tensor
    """Before clipping."""
    own_time: OwnTime


def _attempt(
    training: TrainingModule,
    batch: GlobalBatch,
    config: TrainConfig,
    group: Group,
    step: int,
    losses: Tensor,
    before_exchange: Callable[[], OwnTime],
    observer: StepObserver | None,
) -> _Gradient | None:
    """Sums up the gradient and fills in this rank's losses; None where memory ran out.

    Raises:
        OutOfMemoryAloneError: it did, and this rank cannot do its part of the exchanges.
    """
    accumulation, own_time = training.accumulation, OwnTime(0.0, 0.0)
    own = share_of_rank(batch.num_micro_batches, group)
    scale = (group.world_size if accumulation.averages else 1) / batch.normaliser
    try:
        for number, rows in zip(own, batch.micro_batches, strict=True):
            seed_micro_batch(config.seed, step, number)
            with accumulation.micro_batch(last=number == own[-1]):
                micro_sum = forward_pass(training.module, rows, config, group.device, training.backend)
                if number == own[-1]:
                    own_time = before_exchange()
                training.scaler.scale(micro_sum * scale).backward()  # type: ignore[no-untyped-call]
            losses[number] = micro_sum.detach()
        accumulation.finish()
        for optimizer in training.optimizers:
            training.scaler.unscale_(optimizer)
        if observer is not None:
            observer.before_update(step)
        return _Gradient(_clip(training, config.optim.clip_norm), own_time)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not accumulation.can_join:
            raise OutOfMemoryAloneError(step) from error
        _log.warning("rank %d ran out of memory in step %d: %s", group.rank, step, str(error))
        return None


@contextmanager
def _alone(step: int) -> Iterator[None]:
    """Has this rank end where memory runs out in here, as it can do nothing that the others could go on with."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryAloneError(step) from error


def _join(accumulation: Accumulation, num_passes: int, step: int, *, begun: bool) -> None:
    release_memory()
    with _alone(step):
        if not begun:
            accumulation.begin()  # else the exchanges of the step before would count as this one's
        accumulation.join(num_passes)


def _report(
    group: Group,
    losses: Tensor,
    gradient: _Gradient | None,
    *,
    stop_requested: bool,
    seconds: float,
    save_failed: bool,
    acknowledged_step: int,
    lacks_data: bool,
) -> Tensor:
    """What this rank adds to the report, fp64: `_NUM_NOTES` notes, the ranks' own times in pairs, the losses of micro-batches."""
    num_notes = _NUM_NOTES + 2 * group.world_size
    # Written on the host and copied from pinned memory: to write one number into a tensor on a GPU waits for the GPU.
    notes = torch.zeros(num_notes, dtype=losses.dtype, pin_memory=losses.is_cuda)
    notes[_STOP], notes[_MEMORY], notes[_DATA] = float(stop_requested), float(gradient is None), float(lacks_data)
    if group.is_main:  # what is the same everywhere, or known on rank 0 alone
        notes[_SECONDS], notes[_SAVE_FAILED], notes[_ACKNOWLEDGED] = seconds, float(save_failed), float(acknowledged_step)
    if gradient is not None:
        own_place = _NUM_NOTES + 2 * group.rank
        notes[own_place], notes[own_place + 1] = gradient.own_time.seconds, gradient.own_time.data_s
    report = torch.cat([notes.to(losses.device, non_blocking=True), losses])
    if gradient is not None and group.is_main:
        report[_NORM] = gradient.norm
    return report


def _tensors_of(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """The scaler's state, as it lies on the device: to read it there makes nobody wait."""
    return [value for value in vars(scaler).values() if isinstance(value, Tensor)]


def _clip(training: TrainingModule, clip_norm: float) -> Tensor:
    """Scales the gradient down to `clip_norm` where it is longer; returns its norm before."""
    grad_norm = nn.utils.clip_grad_norm_(training.parameters, clip_norm, foreach=True)
    return grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm


def _is_healthy(loss: Tensor, grad_norm: Tensor, limits: Thresholds) -> Tensor:
    """On the device, what `Thresholds.skips` says: whether the update is made."""
    return (
        loss.isfinite()
        & grad_norm.isfinite()
        & (grad_norm <= limits.skip_norm_above)
        & (grad_norm >= limits.skip_norm_below)
        & (loss <= limits.skip_loss_above)
        & (loss >= limits.skip_loss_below)
    )
