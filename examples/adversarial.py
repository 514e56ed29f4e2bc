"""Trains each micro-batch twice: as it is, and with its embeddings shifted so that the loss rises (adversarial training).

    trainer train --extension examples/adversarial.py ...

The shift of a row is `EPSILON * g / |g|`, where g is the gradient of the loss by the row's embeddings (Miyato et al., 2017:
Adversarial training methods for semi-supervised text classification). The gradient of the step is the mean of both passes. The
reported loss is that of the first pass, so runs can be compared. Both passes have the same dropout.

B rows of a micro-batch   L tokens of a row   D width
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.api import Decoder, MicroStep, PassInputs, linear_cross_entropy_sum

EPSILON = 0.1


def training_step(micro: MicroStep) -> Tensor:
    """Make both passes, and return the sum of the first one's losses."""
    shape = (*micro.rows.tokens.shape, micro.config.model.width)
    shift_BLD = torch.zeros(shape, device=micro.rows.tokens.device, requires_grad=True)
    loss_sum: Tensor = micro.forward(_loss_sum, shift_BLD, draw=0)
    micro.backward(loss_sum / 2)
    assert shift_BLD.grad is not None
    norms_B11 = torch.linalg.vector_norm(shift_BLD.grad, dim=(1, 2), keepdim=True)
    harmful_BLD = EPSILON * shift_BLD.grad / norms_B11.clamp_min(1e-30)  # a row of padding has no gradient
    micro.backward(micro.forward(_loss_sum, harmful_BLD, draw=0) / 2)
    return loss_sum


def _loss_sum(model: Decoder, inputs: PassInputs, shift_BLD: Tensor) -> Tensor:
    hidden_BLD = model.hidden(inputs.tokens, inputs.layout, shift_BLD)
    return linear_cross_entropy_sum(hidden_BLD, model.lm_head.weight, inputs.targets, weights_BL=inputs.weights)
