import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ScheduleConfig
from trainer.schedule import learning_rate_factor


def factor(step: int, **settings: object) -> float:
    return learning_rate_factor(ScheduleConfig(**{"warmup_steps": 10, "floor": 0.1} | settings), 110, step)


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    factors = [factor(step) for step in range(11)]
    assert factors == pytest.approx([(step + 1) / 11 for step in range(11)])


@pytest.mark.parametrize(("kind", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_half_way_down(kind: str, middle: float) -> None:
    assert factor(60, kind=kind) == pytest.approx(middle)


def test_cosine_follows_its_formula() -> None:
    assert factor(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25)))


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_the_floor_is_reached_at_decay_steps_and_kept(kind: str) -> None:
    assert factor(110, kind=kind) == factor(10_000, kind=kind) == 0.1
    assert factor(109, kind=kind) > 0.1


@given(kind=st.sampled_from(["cosine", "linear", "constant"]), step=st.integers(0, 300))
def test_after_warmup_the_factor_never_rises_and_stays_in_range(kind: str, step: int) -> None:
    here, following = factor(step, kind=kind), factor(step + 1, kind=kind)
    assert 0 < here <= 1
    assert step < 10 or following <= here
