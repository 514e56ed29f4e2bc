"""One optimizer step: forward and backward over the micro-batches, clipping, update. The host never waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ProjectError
from trainer.data.batch import GlobalBatch, share_of_rank
from trainer.distributed.stragglers import OwnTime
from trainer.health.guard import Thresholds
from trainer.machine.memory import is_out_of_memory, release_memory
from trainer.optim.optimizers import step_unless
from trainer.training.micro_step import MicroStep, custom_step_loss
from trainer.training.step_report import Gradient, PendingStep, StepInputs, StepReport, encode_report
from trainer.training.trainable import Trainable

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
    scaler_before = trainable.copy_of_scaler()
    began = previous is None or not previous.ran_out
    gradient = accumulate(trainable, batch, inputs) if began else None
    if gradient is None:  # not in an exception handler, where the error keeps the tensors of the failed pass alive
        exchange_without_gradient(trainable, batch, inputs.step, began=began)
    group = trainable.context.group
    num_measures = len(trainable.task.step_metrics)
    report = StepReport(group.sum(encode_report(group, batch, inputs, gradient, num_measures)), batch)
    void = report.failed_ranks > 0 if previous is None else (report.failed_ranks > 0) | previous.void
    skip = (void | ~within(inputs.thresholds, report.loss, report.gradient_norm)).float()
    if gradient is not None:
        with out_of_memory_is_final(inputs.step):  # after an error some weights are updated and others not
            step_unless(trainable.optimizers, skip)
        if inputs.observer is not None:
            inputs.observer.after_update(inputs.step)
        trainable.scaler.update()
        trainable.restore_scaler(scaler_before, where=void)
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
        trainable.unscale_gradients()
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


def exchange_without_gradient(trainable: Trainable, batch: GlobalBatch, step: int, *, began: bool) -> None:
    release_memory()
    with out_of_memory_is_final(step):
        if not began:
            trainable.accumulation.begin()  # otherwise the exchanges of the previous step count for this step
        trainable.accumulation.join(len(share_of_rank(batch.num_micro_batches, trainable.context.group)))


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
    gradient_norm = nn.utils.clip_grad_norm_(trainable.parameters, clip_norm, foreach=True)
    return gradient_norm.full_tensor() if isinstance(gradient_norm, DTensor) else gradient_norm


def within(thresholds: Thresholds, loss: Tensor, gradient_norm: Tensor) -> Tensor:
    """Return on the device whether the update is made. `Thresholds.skips` makes the same decision on the host."""
    return (
        loss.isfinite()
        & gradient_norm.isfinite()
        & (gradient_norm <= thresholds.skip_norm_above)
        & (gradient_norm >= thresholds.skip_norm_below)
        & (loss <= thresholds.skip_loss_above)
        & (loss >= thresholds.skip_loss_below)
    )
