"""One optimizer step: forward and backward over the micro-batches, clipping, update. The host never waits for the device."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from common.errors import ProjectError
from trainer.context import RunContext
from trainer.data.batch import DataFault, GlobalBatch, MicroBatch, share_of_rank
from trainer.distributed.group import Group
from trainer.distributed.stragglers import OwnTime
from trainer.extensions.hooks import Extension
from trainer.finetuning.task import Task
from trainer.health.guard import Thresholds
from trainer.machine.determinism import seed_micro_batch
from trainer.machine.memory import is_out_of_memory, release_memory
from trainer.metrics.layers import LayerObserver
from trainer.model.dropout import row_keys
from trainer.model.forward import CustomPass, LossModule, forward_pass
from trainer.model.parameters import is_sharded, to_host
from trainer.optim.optimizers import step_unless
from trainer.training.trainable import Trainable, scaler_tensors

_NUM_NOTES = 8
_STOP, _SECONDS, _ENDING, _NORM, _SAVE_FAILED, _ACKNOWLEDGED, _MEMORY, _DATA = range(_NUM_NOTES)
"""Indices of the first numbers of a report. The own times of the ranks, what the task measures in each micro-batch, and the
losses of the micro-batches follow."""
FactsT = TypeVar("FactsT")
_log = logging.getLogger(__name__)


class CannotContinueError(ProjectError):
    """This rank ran out of memory and cannot take part in the exchanges of the group, so the launcher must restart the group."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"out of memory in step {step}, and this rank cannot continue with the others; run the same command again: it "
            f"continues from the newest checkpoint, with smaller micro-batches from step {step} on"
        )
        self.step = step


def train_step(trainable: Trainable, batch: GlobalBatch, inputs: StepInputs, *, previous: PendingStep | None = None) -> PendingStep:
    """Update the weights by one global batch. The host does not wait for the device here, but in `PendingStep.result`. Every device
    skips the update if the loss or the gradient norm is not finite or outside `inputs.thresholds`, or if a rank failed in this
    step or in `previous`, whose numbers have not been read yet. A step with a failed rank is void: the loop repeats it. Raises
    CannotContinueError if this rank ran out of memory and cannot do its part of the exchanges.
    """
    scaler_before = [value.clone() for value in scaler_tensors(trainable.scaler)]  # on the device: the host does not wait
    began = previous is None or not previous.ran_out
    gradient = accumulate(trainable, batch, inputs) if began else None
    if gradient is None:  # not in an exception handler, where the error keeps the tensors of the failed pass alive
        release_memory()
        with out_of_memory_is_final(inputs.step):
            if not began:
                trainable.accumulation.begin()  # otherwise the exchanges of the previous step count for this step
            trainable.accumulation.join(len(share_of_rank(batch.num_micro_batches, trainable.context.group)))
    group = trainable.context.group
    num_measures = len(trainable.task.step_metrics)
    report = group.sum(encode_report(group, batch, inputs, gradient, num_measures))
    void = report[_MEMORY] + report[_DATA] > 0  # a rank has no memory or no data
    void = void if previous is None else void | previous.void
    loss = report[len(report) - batch.num_micro_batches :].sum() / batch.normaliser
    skip = (void | ~within(inputs.thresholds, loss, report[_NORM])).float()
    with out_of_memory_is_final(inputs.step):  # after an error some weights are updated and others not
        step_unless(trainable.optimizers, skip)  # also without a gradient, because the ranks may share the products of an update
    if gradient is not None:
        if inputs.observer is not None:
            inputs.observer.after_update(inputs.step)
        trainable.scaler.update()
        for now, before in zip(scaler_tensors(trainable.scaler), scaler_before, strict=True):
            now.copy_(torch.where(void, before, now))
    return PendingStep(inputs.step, report, skip, void, batch, ran_out=gradient is None, num_measures=num_measures)


def accumulate(trainable: Trainable, batch: GlobalBatch, inputs: StepInputs) -> Gradient | None:
    """Leave the clipped gradient of the global batch in the parameters. Return None if this rank ran out of memory.

    The loss of each micro-batch is a sum, divided by the targets of the global batch before backward, so the gradient is that of
    the mean for every size of micro-batches. `losses` has zeros for the micro-batches of other ranks, which changes no bit.
    """
    context, accumulation = trainable.context, trainable.accumulation
    group = context.group
    own = share_of_rank(batch.num_micro_batches, group)
    factor = (group.world_size if accumulation.averages else 1) / batch.normaliser
    losses = torch.zeros(batch.num_micro_batches, dtype=torch.float64, device=group.device)
    measures = losses.new_zeros(len(trainable.task.step_metrics), batch.num_micro_batches)
    own_time = OwnTime(0.0, 0.0)

    def scaled(loss_sum: Tensor) -> Tensor:
        return trainable.scaler.scale(loss_sum * factor)

    with out_of_memory_is_final(inputs.step):
        accumulation.begin()
    try:
        for number, rows in zip(own, batch.micro_batches, strict=True):
            last = number == own[-1]
            micro = MicroStep(trainable.loss, trainable.module, rows, context, (inputs.step, number), scaled)
            with accumulation.micro_batch(last=last):
                loss_sum = custom_step_loss(micro, trainable.extension, trainable.task) if context.custom_step else micro.loss_sum()
                if len(measures):
                    measures[:, number], loss_sum = loss_sum[1:], loss_sum[0]
                if last:
                    own_time = inputs.before_exchange()  # from here on this rank may have to wait for others
                if not context.custom_step:
                    micro.backward(loss_sum)
            losses[number] = loss_sum.detach()
        accumulation.finish()
        for optimizer in trainable.optimizers:
            trainable.scaler.unscale_(optimizer)  # type: ignore[arg-type]  # it reads only the groups
        if inputs.observer is not None:
            inputs.observer.before_update(inputs.step)
        return Gradient(clip_gradient(trainable), losses, own_time, measures.flatten() if len(measures) else None)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not accumulation.can_join:
            raise CannotContinueError(inputs.step) from error
        _log.warning("rank %d ran out of memory in step %d: %s", group.rank, inputs.step, str(error))
        return None


@contextmanager
def out_of_memory_is_final(step: int) -> Iterator[None]:
    # the other ranks cannot continue without this one
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise CannotContinueError(step) from error


def clip_gradient(trainable: Trainable) -> Tensor:
    clip_norm = trainable.context.config.optim.clip_norm
    gradient_norm = nn.utils.clip_grad_norm_(trainable.parameters.values(), clip_norm, foreach=True)
    return gradient_norm.full_tensor() if is_sharded(gradient_norm) else gradient_norm


def within(thresholds: Thresholds, loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """Return on the device whether the update is made."""
    return (
        loss.isfinite()
        & gradient_norm.isfinite()
        & (gradient_norm <= thresholds.skip_norm_above)
        & (gradient_norm >= thresholds.skip_norm_below)
        & (loss <= thresholds.skip_loss_above)
        & (loss >= thresholds.skip_loss_below)
    )


class MicroStep:
    """The passes over one micro-batch. Gradients of all passes add up; the trainer exchanges, clips and applies them.

    Random numbers depend only on seed, step, micro-batch and pass, so runs can be resumed and repeated.
    """

    def __init__(
        self,
        loss: LossModule,
        module: nn.Module,
        rows: MicroBatch,
        context: RunContext,
        place: tuple[int, int],
        scale: Callable[[Tensor], Tensor],
    ) -> None:
        """`module` is `loss` as the training calls it: wrapped by DDP or FSDP. `place` has the number of the step, and of the
        micro-batch within the global batch. `scale` returns the number to differentiate for a sum of losses.
        """
        self.model = loss.model
        """The decoder, or your own model. Call it only through `forward`."""
        self.config = context.config
        self.rows = rows.to(context.group.device)
        """The micro-batch on the device of the run: `tokens`, `segments`, `positions`, `targets`, all (B, L); `weights` or None."""
        self.step, self.number = place
        self.num_backward = 0
        """Number of backward passes so far."""
        self._module, self._context, self._scale = module, context, scale
        self._num_forward = 0

    def loss_sum(self, *, draw: int | None = None) -> Tensor:
        """Return the run's loss, summed over the targets of the micro-batch, as a fp32 scalar. See `forward` for `draw`."""
        return cast(Tensor, self._pass(None, draw))

    def forward(self, function: Callable[..., Any], *tensors: Tensor, draw: int | None = None) -> Any:
        """Return `function(model, inputs, *tensors)`, computed in one forward pass in the run's precision.

        The function runs inside the module that is compiled and that FSDP wraps. Call the model only there.

        Args:
            function: gets the model, the `PassInputs` of the micro-batch, and `tensors`. Define it at the top level of the file: a
                new function in each step would be compiled each time.
            tensors: further arguments.
            draw: passes over a micro-batch with the same number have the same random numbers, and so the same dropout. None: the
                number of forward passes before this one, so each pass has other random numbers.
        """
        return self._pass(CustomPass(function, tensors), draw)

    def backward(self, loss_sum: Tensor) -> None:
        """Add the gradient of a loss that is summed over the micro-batch.

        The trainer divides it by the targets of the whole global batch, and multiplies it by the scale of `precision = fp16`.
        """
        self.num_backward += 1
        self._scale(loss_sum).backward()  # type: ignore[no-untyped-call]

    def _pass(self, custom: CustomPass | None, draw: int | None) -> Any:
        draw = self._num_forward if draw is None else draw
        self._num_forward += 1
        config, device = self.config, self._context.group.device
        seed_micro_batch(config.seed, self.step, self.number, draw)
        keys_B = None
        if config.has_dropout:
            num_rows = len(self.rows.tokens)
            keys_B = row_keys(config.seed, self.step, self.number * num_rows, num_rows, device, draw)
        return forward_pass(self._module, self.rows, config, device, self._context.backend, keys_B=keys_B, custom=custom)


def custom_step_loss(micro: MicroStep, extension: Extension, task: Task) -> Tensor:
    if task.sums is None:
        return extension.step_loss(micro)
    sums: Tensor = micro.forward(task.sums(micro.rows.tokens.device))
    micro.backward(sums[0])
    return sums.detach().float()


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
        report: Tensor,
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
        self._numbers = to_host(torch.cat([skip.to(report.dtype).reshape(1), report]))

    def result(self) -> StepResult:
        skip, votes, seconds, ending_s, norm, save_failed, acknowledged, memory_votes, data_votes, *rest = self._numbers().tolist()
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
