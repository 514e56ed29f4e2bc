"""One micro-batch of a training step: its forward and backward passes, by the trainer, a task or an extension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from trainer.context import RunContext
from trainer.data.batch import MicroBatch
from trainer.extensions.hooks import Extension
from trainer.finetuning.task import Task
from trainer.machine.determinism import seed_micro_batch
from trainer.model.dropout import row_keys
from trainer.model.forward import CustomPass, LossModule, forward_pass


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
