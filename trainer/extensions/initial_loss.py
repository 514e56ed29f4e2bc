"""A check of a loss that a user has written, by its value in the first step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.runs.progress import Evaluated

_FACTOR = 3.0


def initial_loss_warning(loss: float, evaluations: Sequence[Evaluated], vocab_size: int) -> str | None:
    """Return a warning if the loss of the first step differs from the cross-entropy of the same weights by a factor of 3 or more.

    A loss that returns a mean, or a sum over something other than the targets, is wrong by a factor of 4 or more in any real batch.
    Without an evaluation, the cross-entropy is that of equal probabilities, `ln(vocab_size)`.
    """
    measured = evaluations[0].val_loss if evaluations else math.log(vocab_size)
    if not measured or not math.isfinite(loss) or 1 / _FACTOR <= loss / measured <= _FACTOR:
        return None
    return (
        f"the loss of the extension is {loss:.4g} for each target in the first step, and the cross-entropy of the same weights is "
        f"about {measured:.4g}; a loss must be the sum over all targets of a micro-batch, not their mean, because the trainer "
        "divides it by their number. If this is intended, the learning rate and optim.clip_norm may need other values"
    )
