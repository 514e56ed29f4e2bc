"""Replaces the loss by the focal loss, which gives less weight to targets that the model predicts with high probability.

    trainer train --extension examples/loss.py ...

The loss of a target with probability p is `-(1 - p)^GAMMA * log(p)` (Lin et al., 2017, eq. 4); GAMMA = 0 is cross-entropy.
Evaluations always measure plain cross-entropy, so that runs can be compared.

B rows of a micro-batch   L tokens of a row   V vocabulary
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from trainer.api import IGNORE

GAMMA = 1.0


def loss(logits_BLV: Tensor, targets_BL: Tensor, weights_BL: Tensor | None) -> Tensor:
    """Return the weighted sum over all targets. Positions without a target contribute 0."""
    entropy_BL = functional.cross_entropy(
        logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), ignore_index=IGNORE, reduction="none"
    ).view_as(targets_BL)
    focal_BL = (1 - (-entropy_BL).exp()) ** GAMMA * entropy_BL
    return (focal_BL if weights_BL is None else focal_BL * weights_BL).sum()
