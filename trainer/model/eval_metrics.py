"""EvalMetrics of an evaluation besides the loss, as an objective of fine-tuning defines them.

B rows   L tokens of a row   N targets of a batch   K facts of a target
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainer.runs.events import MeasuresEvent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.model.forward import PassInputs


@dataclass(frozen=True)
class EvalMetrics:
    score: Callable[[nn.Module, PassInputs], Tensor]
    """`(model, inputs)` returns fp32 numbers for each position, (B, L, 1 + K): the loss, which counts at targets, and K facts. The
    result of a row must not depend on the other rows of the pass."""
    count: Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.int64]]
    """`(facts_NK, targets_N)` returns a table of integers, always with the same shape. The tables of all batches and ranks are
    added, so the sum has the same bits for any number of ranks. The first call has no target."""
    event: Callable[[int, NDArray[np.int64]], MeasuresEvent]  # `(step, table)` returns the event for the summed table
    lines: Callable[[MeasuresEvent], str]  # returns the event as text for `trainer evaluate`
