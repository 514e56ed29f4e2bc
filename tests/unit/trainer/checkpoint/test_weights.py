from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from common.errors import GuardError
from trainer.checkpoint.of_run import check_finite
from trainer.checkpoint.store import Checkpoint

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def check(weight: Tensor) -> None:
    check_finite(Checkpoint(3, {"first": torch.ones(2), "second": weight}, {}, {}))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (70_000,)])
def test_finite_weights_pass(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check(torch.full(shape, -2.5, dtype=dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 35_000, -1])
def test_one_value_that_is_not_finite_is_enough(dtype: torch.dtype, value: float, place: int) -> None:
    weight = torch.ones(70_000, dtype=dtype)
    weight[place] = value
    with pytest.raises(GuardError, match=r"step 3: weight second is not finite, so nothing is saved"):
        check(weight)


def test_large_numbers_and_integers_are_finite() -> None:
    check(torch.tensor([1e300, -1e300], dtype=torch.float64))
    check(torch.arange(5))
