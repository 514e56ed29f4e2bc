import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs.draw_schedules import PICTURE, draw
from trainer.config import ScheduleConfig
from trainer.optim.schedule import learning_rate_factor, weight_decay_factor

WARMUP, DECAY_STEPS, FLOOR = 10, 110, 0.1
KINDS = ["cosine", "linear", "wsd", "polynomial", "exponential", "step", "constant"]
FALLING = ["cosine", "linear", "wsd", "polynomial", "exponential"]
SETTINGS = {"warmup_steps": WARMUP, "min_lr_ratio": FLOOR, "decay_share": 0.2, "power": 3.0, "milestones": (40, 80), "gamma": 0.5}

# Each decay for the settings above; wsd decays in the last 22 of 110 steps.
FORMULAS: dict[str, Callable[[int], float]] = {
    "cosine": lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 10) / 100)) / 2,
    "linear": lambda step: 0.1 + 0.9 * (110 - step) / 100,
    "wsd": lambda step: 1.0 if step <= 88 else 0.1 + 0.9 * (110 - step) / 22,
    "polynomial": lambda step: 0.1 + 0.9 * ((110 - step) / 100) ** 3,
    "exponential": lambda step: math.exp(math.log(0.1) * (step - 10) / 100),
    "step": lambda step: 1.0 if step < 40 else 0.5 if step < 80 else 0.25,
    "constant": lambda step: 1.0,
}
# The largest decrease from one step to the next that the formulas above allow.
LARGEST_FALL = {
    "cosine": 0.9 * math.pi / 200,
    "linear": 0.9 / 100,
    "wsd": 0.9 / 22,
    "polynomial": 0.9 * (1 - 0.99**3),
    "exponential": 1 - 0.1**0.01,
    "constant": 0.0,
}


def factor(kind: str, step: int, decay_steps: int = DECAY_STEPS, **settings: object) -> float:
    return learning_rate_factor(ScheduleConfig(**{"kind": kind} | SETTINGS | settings), decay_steps, step)


@pytest.mark.parametrize("kind", KINDS)
def test_the_warmup_rises_in_equal_steps_to_the_peak(kind: str) -> None:
    assert [factor(kind, step) for step in range(WARMUP + 1)] == pytest.approx([(step + 1) / 11 for step in range(WARMUP + 1)])
    assert factor(kind, WARMUP) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_without_warmup_the_first_step_is_at_the_peak(kind: str) -> None:
    assert factor(kind, 0, warmup_steps=0) == 1.0


@pytest.mark.parametrize("step", [10, 11, 35, 39, 40, 41, 60, 79, 80, 81, 87, 88, 89, 90, 108, 109])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fall_follows_its_formula_at_every_joint(kind: str, step: int) -> None:
    assert factor(kind, step) == pytest.approx(FORMULAS[kind](step), rel=1e-12)


@pytest.mark.parametrize("kind", FALLING)
def test_the_floor_is_reached_at_decay_steps_and_kept(kind: str) -> None:
    assert factor(kind, DECAY_STEPS - 1) > FLOOR
    assert {factor(kind, step) for step in (DECAY_STEPS, DECAY_STEPS + 1, 1 << 40)} == {FLOOR}


def test_wsd_keeps_the_peak_until_its_share_of_the_steps_begins() -> None:
    assert [factor("wsd", step) == 1.0 for step in (10, 87, 88, 89)] == [True, True, True, False]
    assert factor("wsd", 54, decay_share=0.5) == factor("wsd", 55, decay_share=0.5) == 1.0 > factor("wsd", 56, decay_share=0.5)


def test_wsd_with_a_share_of_all_steps_falls_from_the_end_of_the_warmup() -> None:
    assert [factor("wsd", step, decay_share=1.0) for step in range(200)] == [factor("linear", step) for step in range(200)]


@pytest.mark.parametrize(("decay_steps", "share"), [(7, 0.2), (3, 0.2), (2, 0.01), (110, 0.001)])
def test_the_last_step_of_wsd_is_below_the_peak_however_few_steps_there_are(decay_steps: int, share: float) -> None:
    factors = [factor("wsd", step, decay_steps, decay_share=share, warmup_steps=0) for step in range(decay_steps)]
    assert factors[:-1] == [1.0] * (decay_steps - 1)
    assert factors[-1] == pytest.approx(0.55)  # halfway between the peak and the floor of 0.1


def test_cooldown_steps_take_the_place_of_the_share() -> None:
    by_steps = [factor("wsd", step, cooldown_steps=22, decay_share=0.9) for step in range(120)]
    assert by_steps == [factor("wsd", step) for step in range(120)]


def test_the_sqrt_cooldown_falls_by_its_formula_and_faster_at_first() -> None:
    factors = [factor("wsd", step, cooldown_shape="sqrt") for step in range(88, 111)]
    assert factors == pytest.approx([0.1 + 0.9 * (1 - math.sqrt(k / 22)) for k in range(23)], rel=1e-12)
    assert all(factor("wsd", step, cooldown_shape="sqrt") < factor("wsd", step) for step in range(89, 110))


def test_wsd_without_an_end_stays_at_the_peak() -> None:
    assert {factor("wsd", step, decay_steps=0) for step in (WARMUP, 100, 1 << 40)} == {1.0}


def test_a_cooldown_that_begins_at_another_step_falls_as_one_that_was_planned_so() -> None:
    planned = ScheduleConfig(kind="wsd", warmup_steps=3, cooldown_steps=10)
    begun = ScheduleConfig(kind="wsd", warmup_steps=3)
    assert [learning_rate_factor(planned, 30, step) for step in range(35)] == [
        learning_rate_factor(begun, 30, step, start=20) for step in range(35)
    ]


@pytest.mark.parametrize(("kind", "factors"), [("constant", [1, 1, 1, 1]), ("lr", [0.5] * 4), ("linear", [1.0, 0.75, 0.25, 0.0])])
def test_the_weight_decay_follows_its_schedule(kind: str, factors: list[float]) -> None:
    config = ScheduleConfig(**{"weight_decay": kind})
    assert [weight_decay_factor(config, 40, step, 0.5) for step in (0, 10, 30, 50)] == factors


def test_each_milestone_multiplies_once_from_its_own_step_on() -> None:
    assert [factor("step", step, gamma=0.5) for step in (39, 40, 41, 79, 80, 81)] == [1.0, 0.5, 0.5, 0.5, 0.25, 0.25]


def test_milestones_do_not_go_below_the_floor_and_know_nothing_of_decay_steps() -> None:
    assert [factor("step", step, gamma=0.2) for step in (79, 80, 10_000)] == [0.2, FLOOR, FLOOR]
    assert [factor("step", step, decay_steps=5) for step in range(100)] == [factor("step", step) for step in range(100)]


@pytest.mark.parametrize("kind", FALLING)
@pytest.mark.parametrize("decay_steps", [1, 9, 10])
def test_a_warmup_that_outlasts_the_decay_is_followed_by_the_floor(kind: str, decay_steps: int) -> None:
    assert factor(kind, WARMUP - 1, decay_steps) == pytest.approx(10 / 11)
    assert factor(kind, WARMUP, decay_steps) == FLOOR


@pytest.mark.parametrize("kind", LARGEST_FALL)
def test_no_step_falls_further_than_the_steepest_place_of_its_formula(kind: str) -> None:
    falls = [factor(kind, step) - factor(kind, step + 1) for step in range(WARMUP, 3 * DECAY_STEPS)]
    assert max(falls) <= LARGEST_FALL[kind] + 1e-12


@given(
    kind=st.sampled_from(KINDS),
    step=st.integers(0, 3_000),
    warmup=st.integers(0, 300),
    decay_steps=st.integers(1, 2_000),
    floor=st.floats(1e-6, 1.0),
    share=st.floats(0.001, 1.0),
    power=st.floats(0.1, 10.0),
)
def test_after_warmup_the_factor_never_rises_and_stays_between_floor_and_peak(
    kind: str, step: int, warmup: int, decay_steps: int, floor: float, share: float, power: float
) -> None:
    if kind == "step":  # its first milestone comes after the warm-up
        warmup = min(warmup, 40)
    settings = {"warmup_steps": warmup, "min_lr_ratio": floor, "decay_share": share, "power": power}
    here, following = (factor(kind, at, decay_steps, **settings) for at in (step, step + 1))
    assert 0 < here <= 1
    assert step < warmup or floor * (1 - 1e-12) <= following <= here


def test_the_picture_in_the_docs_is_the_one_that_the_schedules_draw() -> None:
    assert PICTURE.read_text() == draw(), "draw it again: python -m docs.draw_schedules"
