"""One optimizer step: forward and backward over the micro-batches, clipping, update. The host never waits for the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from common.errors import ProjectError
from trainer.context import RunContext
from trainer.data.batch import GlobalBatch, MicroBatch, share_of_rank
from trainer.distributed.stragglers import OwnTime
from trainer.extensions.hooks import Extension
from trainer.finetuning.task import Task
from trainer.health.guard import Thresholds
from trainer.machine.determinism import seed_micro_batch
from trainer.machine.memory import is_out_of_memory, release_memory
from trainer.model.dropout import row_keys
from trainer.model.forward import CustomPass, LossModule, forward_pass
from trainer.optim.optimizers import step_unless
from trainer.training.step_report import DATA, MEMORY, NORM, Gradient, PendingStep, StepInputs, encode_report
from trainer.training.trainable import Trainable, scaler_tensors

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
    void = report[MEMORY] + report[DATA] > 0  # a rank has no memory or no data
    void = void if previous is None else void | previous.void
    loss = report[len(report) - batch.num_micro_batches :].sum() / batch.normaliser
    skip = (void | ~within(inputs.thresholds, loss, report[NORM])).float()
    if gradient is not None:
        with out_of_memory_is_final(inputs.step):  # after an error some weights are updated and others not
            step_unless(trainable.optimizers, skip)
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
            trainable.scaler.unscale_(optimizer)
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
    return extension.step_loss(micro) if task.step is None else task.step(micro).detach().float()
