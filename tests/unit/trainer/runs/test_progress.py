from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainer.runs.state import Progress


@pytest.mark.parametrize("first", [math.nan, math.inf])
def test_the_best_evaluation_is_the_lowest_that_gave_a_number(first: float) -> None:
    progress = Progress(step=1).after_evaluation(first)
    assert (progress.evaluated_step, progress.best_step, progress.best_val_loss) == (1, None, None)
    for step, loss, best in ((2, 3.0, 2), (3, math.nan, 2), (4, 2.5, 4), (5, 2.75, 4)):
        progress = replace(progress, step=step, evaluations=()).after_evaluation(loss)
        assert progress.best_step == best
    assert progress.best_val_loss == 2.5
