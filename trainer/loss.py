"""What is minimised: cross-entropy of the next token, summed, in fp32.

B rows   L tokens of a row   V vocabulary
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["IGNORE", "cross_entropy_sum", "cross_entropy_rows"]

IGNORE = -100
"""The target of a position that has none: the last token of a document, and padding."""


def cross_entropy_sum(logits_BLV: Tensor, targets_BL: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum of `-log softmax(logits)[target]` over all targets, a fp32 scalar, in nats.

    The sum, not the mean: the caller divides by the targets of the whole global batch, so that the result does not depend
    on how the batch is cut. With label smoothing s, the target has probability 1-s and s is spread evenly over the
    vocabulary (Szegedy et al., 2016).
    """
    return functional.cross_entropy(
        logits_BLV.flatten(0, 1).float(),
        targets_BL.flatten(),
        ignore_index=IGNORE,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def cross_entropy_rows(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """The same without smoothing, summed within each row and in fp64; shape (B,)."""
    losses = functional.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets_BL).double().sum(dim=1)
