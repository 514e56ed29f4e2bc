"""Trains two tasks at once: a second output predicts the token after the next one (Gloeckle et al., 2024).

    trainer train --extension examples/two_tasks.py ...

The loss is the cross-entropy of the next token plus `SHARE` times that of the second task. Validation and generation use only the
output for the next token.

B rows of a micro-batch   L tokens of a row
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.api import IGNORE, Decoder, MicroStep, ModelConfig, PassInputs, linear_cross_entropy_sum

SHARE = 0.3


class TwoHeads(Decoder):
    """The decoder with a second output projection."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__(config, vocab_size)
        self.second_head = nn.Linear(config.width, config.padded_vocab(vocab_size), bias=False)


def build_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Return the model with new weights. The trainer has seeded torch's generator."""
    model = TwoHeads(config, vocab_size)
    for weight in model.parameters():
        if weight.ndim >= 2:
            nn.init.normal_(weight, std=config.init_std)
    return model


def training_step(micro: MicroStep) -> Tensor:
    """Make one forward and one backward pass for both tasks, and return the sum of both losses."""
    next_sum, second_sum = micro.forward(_both)
    loss_sum: Tensor = next_sum + SHARE * second_sum
    micro.backward(loss_sum)
    return loss_sum


def _both(model: TwoHeads, inputs: PassInputs) -> tuple[Tensor, Tensor]:
    hidden_BLD = model.hidden(inputs.tokens, inputs.layout)
    targets_BL = inputs.targets
    later_BL = torch.full_like(targets_BL, IGNORE)
    later_BL[:, :-1] = torch.where(targets_BL[:, :-1] == IGNORE, IGNORE, targets_BL[:, 1:])  # stays inside the document
    heads = ((model.lm_head.weight, targets_BL), (model.second_head.weight, later_BL))
    next_sum, second_sum = (linear_cross_entropy_sum(hidden_BLD, w, t, weights_BL=inputs.weights) for w, t in heads)
    return next_sum, second_sum
