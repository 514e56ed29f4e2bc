"""The numbers of a step: summed over the ranks, copied to the host while the device works on, and read one step later."""

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
from trainer.metrics.layers import LayerObserver

_NUM_NOTES = 8
_STOP, _SECONDS, _ENDING, _NORM, _SAVE_FAILED, _ACKNOWLEDGED, _MEMORY, _DATA = range(_NUM_NOTES)
"""Indices of the first numbers of a report. The own times of the ranks, what the task measures in each micro-batch, and the
losses of the micro-batches follow."""


@dataclass(frozen=True)
class StepInputs:
    step: int  # number of the step, from 1
    seconds: float = 0.0  # time of this rank since the run began
    ending_s: float = 0.0  # `Clock.ending_s` of this rank
    stop_requested: bool = False  # whether this rank was asked to stop
    save_failed: bool = False  # whether this rank failed to write a checkpoint
    acknowledged_step: int = -1  # step of the newest checkpoint that this rank has written, -1 if there is none
    thresholds: Thresholds = field(default_factory=Thresholds)
    """Bounds of loss and gradient norm. Outside them the update is skipped."""
    before_exchange: Callable[[], OwnTime] = lambda: OwnTime(0.0, 0.0)
    """Called before this rank may wait for another rank. The step reports the result."""
    observer: LayerObserver | None = None
    """Measures the gradients before they are clipped, and the weights before and after the update, on every rank."""


@dataclass(frozen=True)
class Gradient:
    norm: Tensor  # global norm before clipping
    losses: Tensor  # loss sums by micro-batch of the global batch, fp64. The elements of other ranks are zero.
    own_time: OwnTime
    measures: Tensor | None = None
    """Sums that the task measures, fp64: those of its first measure by micro-batch, then those of the second. None: no
    measures."""


def encode_report(group: Group, batch: GlobalBatch, inputs: StepInputs, gradient: Gradient | None, num_measures: int = 0) -> Tensor:
    """Return this rank's part of the report, fp64: notes, own times in pairs, measures, losses; zero losses without a gradient."""
    num_notes, device = _NUM_NOTES + 2 * group.world_size, group.device
    losses = torch.zeros((1 + num_measures) * batch.num_micro_batches, dtype=torch.float64, device=device)
    if gradient is not None:
        losses = gradient.losses if gradient.measures is None else torch.cat([gradient.measures, gradient.losses])
    # Written on the host and copied from pinned memory, because writing a number into a tensor on a GPU waits for the GPU.
    notes = torch.zeros(num_notes, dtype=torch.float64, pin_memory=losses.is_cuda)
    notes[_STOP], notes[_MEMORY], notes[_DATA] = inputs.stop_requested, gradient is None, batch.fault is not None
    if group.is_main:  # values that are equal on all ranks, or known on rank 0 alone
        notes[_SECONDS], notes[_ENDING] = inputs.seconds, inputs.ending_s
        notes[_SAVE_FAILED], notes[_ACKNOWLEDGED] = inputs.save_failed, inputs.acknowledged_step
    if gradient is not None:
        own_place = _NUM_NOTES + 2 * group.rank
        notes[own_place], notes[own_place + 1] = gradient.own_time.seconds, gradient.own_time.data_s
    report = torch.cat([notes.to(device, non_blocking=True), losses])
    if gradient is not None and group.is_main:
        report[_NORM] = gradient.norm
    return report


class StepReport:
    def __init__(self, numbers: Tensor, batch: GlobalBatch) -> None:
        self.numbers = numbers
        self.failed_ranks = numbers[_MEMORY] + numbers[_DATA]  # number of ranks without memory or without data
        self.loss = numbers[len(numbers) - batch.num_micro_batches :].sum() / batch.normaliser
        self.gradient_norm = numbers[_NORM]


@dataclass(frozen=True)
class StepResult:
    step: int  # number of the step, from 1
    loss: float  # mean over the targets (or sequences) of the global batch, in nats
    grad_norm: float  # global gradient norm before clipping
    stop_votes: int  # number of ranks that were asked to stop
    seconds: float  # time of rank 0 before this step, since the run began
    ending_s: float  # `Clock.ending_s` of rank 0
    save_failed: bool  # whether a save in the background has failed
    acknowledged_step: int
    """Step of the newest checkpoint that rank 0 had written before this step, -1 if there is none since the start."""
    own_times: tuple[OwnTime, ...]  # own time of each rank in this step, or in the newest step that its device had finished
    applied: bool  # whether the device made the update
    memory_votes: int  # number of ranks that ran out of memory
    data_votes: int  # number of ranks that could not read their rows
    fault: DataFault | None  # the data that this rank could not read. Only this field differs between ranks.
    measures: tuple[float, ...] = ()  # what the task measures, as means over the targets of the global batch

    @property
    def void(self) -> bool:
        # a rank failed: the step changed nothing and is repeated
        return self.memory_votes > 0 or self.data_votes > 0


class PendingStep:
    def __init__(
        self,
        step: int,
        report: StepReport,
        skip: Tensor,
        void: Tensor,
        batch: GlobalBatch,
        *,
        ran_out: bool,
        num_measures: int = 0,
    ) -> None:
        self._num_measures = num_measures
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
        if self._arrived is not None:
            self._arrived.synchronize()
        skip, votes, seconds, ending_s, norm, save_failed, acknowledged, memory_votes, data_votes, *rest = self._numbers.tolist()
        size, num_measures = self._num_losses, self._num_measures
        own_s, sums = rest[: len(rest) - (1 + num_measures) * size], rest[len(rest) - (1 + num_measures) * size :]
        losses = sums[num_measures * size :]
        return StepResult(
            step=self._step,
            loss=math.fsum(losses) / self._normaliser,
            grad_norm=norm,
            stop_votes=int(votes),
            seconds=seconds,
            ending_s=ending_s,
            save_failed=bool(save_failed),
            acknowledged_step=int(acknowledged),
            own_times=tuple(OwnTime(*pair) for pair in zip(own_s[::2], own_s[1::2], strict=True)),
            applied=not skip,
            memory_votes=int(memory_votes),
            data_votes=int(data_votes),
            fault=self._fault,
            measures=tuple(
                math.fsum(sums[number * size : (number + 1) * size]) / self._normaliser for number in range(num_measures)
            ),
        )


FactsT = TypeVar("FactsT")


class StepResults(Generic[FactsT]):
    """Results in the order of the steps. Each is read `lag` steps late, so that the host does not wait for the device."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._pending: deque[tuple[PendingStep, FactsT]] = deque()

    @property
    def newest(self) -> PendingStep | None:
        return self._pending[-1][0] if self._pending else None

    def add(self, pending: PendingStep, facts: FactsT) -> None:
        self._pending.append((pending, facts))

    def due(self, *, everything: bool = False) -> Iterator[tuple[StepResult, FactsT]]:
        while len(self._pending) > (0 if everything else self._lag):
            pending, facts = self._pending.popleft()
            yield pending.result(), facts
