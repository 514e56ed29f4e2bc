"""The numbers of a step: added up over the ranks, sent to the host while the device goes on, and read one step later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from trainer.data.batch import DataFault, GlobalBatch
from trainer.distributed.group import Group
from trainer.distributed.stragglers import OwnTime
from trainer.health.guard import Thresholds
from trainer.metrics.layers import StepObserver

__all__ = ["Gradient", "PendingStep", "StepInputs", "StepReport", "StepResult", "StepResults", "encode_report"]

_NUM_NOTES = 7
_STOP, _SECONDS, _NORM, _SAVE_FAILED, _ACKNOWLEDGED, _MEMORY, _DATA = range(_NUM_NOTES)
"""Places of the numbers that come before the ranks' own times and the losses of the micro-batches."""


class _NoObserver:
    def before_update(self, step: int) -> None: ...

    def after_update(self, step: int) -> None: ...


@dataclass(frozen=True)
class StepInputs:
    """What a step is told besides its batch."""

    step: int
    """Its number, from 1."""
    seconds: float = 0.0
    """Training time of this rank so far."""
    stop_requested: bool = False
    """This rank was asked to stop."""
    save_failed: bool = False
    """This rank could not write a checkpoint."""
    acknowledged_step: int = -1
    """The newest checkpoint that this rank has written."""
    thresholds: Thresholds = field(default_factory=Thresholds)
    """Of loss and gradient norm. Outside of them the update is withheld."""
    before_exchange: Callable[[], OwnTime] = lambda: OwnTime(0.0, 0.0)
    """Called before this rank may have to wait for another; its result is reported."""
    observer: StepObserver = field(default_factory=_NoObserver)
    """Looks at the gradients before they are clipped, and at the weights before and after the update, on every rank."""


@dataclass(frozen=True)
class Gradient:
    """The gradient of a global batch is in the parameters, clipped."""

    norm: Tensor
    """Before clipping."""
    losses: Tensor
    """Sums of this rank's micro-batches, fp64, each in its place of the global batch; the other places are zero."""
    own_time: OwnTime


def encode_report(group: Group, batch: GlobalBatch, inputs: StepInputs, gradient: Gradient | None) -> Tensor:
    """What this rank adds to the report of a step, fp64: notes, the ranks' own times in pairs, the losses of micro-batches.

    A rank without a gradient reports zero losses. Its step is void, so no one uses that loss.
    """
    num_notes, device = _NUM_NOTES + 2 * group.world_size, group.device
    losses = torch.zeros(batch.num_micro_batches, dtype=torch.float64, device=device) if gradient is None else gradient.losses
    # Written on the host and copied from pinned memory: to write one number into a tensor on a GPU waits for the GPU.
    notes = torch.zeros(num_notes, dtype=torch.float64, pin_memory=losses.is_cuda)
    notes[_STOP], notes[_MEMORY], notes[_DATA] = inputs.stop_requested, gradient is None, batch.fault is not None
    if group.is_main:  # what is equal on all ranks, or known on rank 0 alone
        notes[_SECONDS], notes[_SAVE_FAILED] = inputs.seconds, inputs.save_failed
        notes[_ACKNOWLEDGED] = inputs.acknowledged_step
    if gradient is not None:
        own_place = _NUM_NOTES + 2 * group.rank
        notes[own_place], notes[own_place + 1] = gradient.own_time.seconds, gradient.own_time.data_s
    report = torch.cat([notes.to(device, non_blocking=True), losses])
    if gradient is not None and group.is_main:
        report[_NORM] = gradient.norm
    return report


class StepReport:
    """The sum of the ranks' reports, on the device."""

    def __init__(self, numbers: Tensor, batch: GlobalBatch) -> None:
        self.numbers = numbers
        self.failed_ranks = numbers[_MEMORY] + numbers[_DATA]
        """Ranks without memory or without data."""
        self.loss = numbers[len(numbers) - batch.num_micro_batches :].sum() / batch.normaliser
        self.gradient_norm = numbers[_NORM]


@dataclass(frozen=True)
class StepResult:
    """The result of one step, equal on every rank."""

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
    """What this rank could not read. Only this field differs between ranks."""

    @property
    def void(self) -> bool:
        """A rank failed, so nothing of the step counts, and it is repeated."""
        return self.memory_votes > 0 or self.data_votes > 0


class PendingStep:
    """The numbers of a step, on their way from the device.

    Args:
        step: its number.
        report: the sum of the ranks' reports.
        skip: on the device: 1 where the update was withheld, else 0.
        void: on the device: true where a rank failed, in this step or in one before that is still on its way.
        batch: this rank's part of the global batch.
        ran_out: this rank itself ran out of memory, in this step or in one before that is still on its way.
    """

    def __init__(self, step: int, report: StepReport, skip: Tensor, void: Tensor, batch: GlobalBatch, *, ran_out: bool) -> None:
        self.skip, self.void, self.ran_out = skip, void, ran_out
        self._step = step
        self._num_losses, self._normaliser, self._fault = batch.num_micro_batches, batch.normaliser, batch.fault
        self._arrived: torch.cuda.Event | None = None
        numbers = torch.cat([skip.to(report.numbers.dtype).reshape(1), report.numbers])
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
        own_s, losses = rest[: len(rest) - self._num_losses], rest[len(rest) - self._num_losses :]
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
