from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import EvalConfig, LossConfig
from trainer.health.convergence import LossMean, is_comparable, judge_convergence, trend, with_convergence
from trainer.runs.events import AlertEvent, EvalEvent
from trainer.runs.limits import early_stop, evaluations_without_gain
from trainer.runs.state import Evaluated, LossSums

EVERY = 100
SETTINGS = EvalConfig()
Curve = Callable[[int], float]

losses = st.one_of(st.none(), st.floats(0.1, 10))
histories = st.lists(st.tuples(losses, losses), max_size=40).map(
    lambda pairs: [Evaluated(EVERY * number, *pair) for number, pair in enumerate(pairs)]
)


def history(validation: Curve, training: Curve, count: int = 60, noise: float = 0.0, seed: int = 0) -> list[Evaluated]:
    generator = np.random.default_rng(seed)

    def noisy(loss: float) -> float:
        return loss * (1 + noise * float(generator.standard_normal()))

    return [
        Evaluated(EVERY * number, noisy(validation(number)), noisy(training(number)) if number else None) for number in range(count)
    ]


def told(evaluations: list[Evaluated], choice: EvalConfig = SETTINGS) -> list[AlertEvent]:
    """The alerts of a run, as they come one evaluation after the other."""
    return [alert for end in range(1, len(evaluations) + 1) for alert in judge_convergence(evaluations[:end], choice)]


def falling(number: int) -> float:
    return 2 + 4 * math.exp(-number / 30)


def test_a_plateau_is_told_once_at_the_first_window_that_hardly_changes() -> None:
    evaluations = history(lambda number: max(3.0, 6 - 0.1 * number), falling)
    assert [(alert.rule, alert.step) for alert in told(evaluations)] == [("plateau", 3700)]
    [alert] = told(evaluations)
    assert alert.threshold == 0.001
    assert abs(alert.value) < 0.001
    assert "+0.00%" in alert.message or "-0.00%" in alert.message
    assert "steps 2800 to 3700" in alert.message


def test_a_second_plateau_is_told_after_the_loss_fell_again() -> None:
    def loss(number: int) -> float:
        return 4.0 if number < 20 else max(2.0, 4 - 0.1 * (number - 20))

    assert [alert.step for alert in told(history(loss, falling, 80)) if alert.rule == "plateau"] == [900, 4700]


def test_overfitting_is_told_once_when_validation_has_risen_for_a_window_while_training_fell() -> None:
    evaluations = history(lambda number: 3 + 0.02 * abs(number - 25), falling)
    assert [(alert.rule, alert.step) for alert in told(evaluations)] == [("overfitting", 3200)]
    assert "rose by" in told(evaluations)[0].message


def test_the_alert_of_overfitting_has_changes_in_nats_that_stay_readable_for_small_losses() -> None:
    evaluations = [Evaluated(step, 2 + step / 1000, 0.9 ** (step / 10)) for step in range(0, 1000, 100)]
    message = told(evaluations)[-1].message
    assert "the validation loss rose by 0.9 nats while the training loss fell by" in message
    assert "%" not in message


def test_a_validation_loss_that_rises_with_the_training_loss_is_no_overfitting() -> None:
    assert not told(history(lambda number: 3 + 0.02 * number, lambda number: 3 + 0.02 * number))


def test_without_training_losses_there_is_no_overfitting() -> None:
    evaluations = [Evaluated(number, 3 + 0.02 * number, None) for number in range(30)]
    assert not told(evaluations)


@pytest.mark.parametrize("noise", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("seed", range(5))
def test_a_clean_noisy_run_that_gets_better_has_no_alert(noise: float, seed: int) -> None:
    evaluations = history(lambda number: 7 - 0.1 * number, lambda number: 6.9 - 0.1 * number, 50, noise, seed)
    assert told(evaluations) == []


def test_noise_without_a_trend_is_no_overfitting() -> None:
    evaluations = history(lambda _: 3.0, lambda _: 3.0, 500, noise=0.01)
    assert {alert.rule for alert in told(evaluations)} == {"plateau"}


@given(evaluations=histories)
@settings(max_examples=50)
def test_a_rule_is_told_at_most_once_in_a_window(evaluations: list[Evaluated]) -> None:
    choice = EvalConfig(plateau_window=7, plateau_threshold=0.2)
    numbers = [evaluated.step for evaluated in evaluations if evaluated.val_loss is not None]
    for rule in ("plateau", "overfitting"):
        places = [numbers.index(alert.step) for alert in told(evaluations, choice) if alert.rule == rule]
        assert all(later - earlier > 7 for earlier, later in pairwise(places))


def stops_at(validation: list[float | None], **changes: float) -> int | None:
    """The number of the evaluation after which training ends."""
    choice = EvalConfig(**changes)  # type: ignore[arg-type]
    evaluations = [Evaluated(number, loss, None) for number, loss in enumerate(validation)]
    return next((end for end in range(len(evaluations)) if early_stop(evaluations[: end + 1], choice)), None)


def test_training_ends_after_so_many_evaluations_in_a_row_without_improvement() -> None:
    assert stops_at([5, 4, 4.1, 4.2, 4.3, 3], patience=3) == 4
    assert stops_at([5, 4, 4.1, 4.2, 3.9, 4, 4, 4], patience=3) == 7
    assert stops_at([5, 4, 3, 2, 1], patience=1) is None
    assert stops_at([5, 5], patience=1) == 1
    assert stops_at([5] * 100) is None


def test_improvements_below_the_minimum_count_once_they_add_up() -> None:
    shrinking = [5 - 0.04 * number for number in range(12)]
    assert stops_at(shrinking, patience=3, min_delta=0.1) is None
    assert stops_at(shrinking, patience=2, min_delta=0.1) == 2
    assert stops_at(shrinking, patience=3) is None


def test_an_evaluation_that_is_no_number_does_not_improve() -> None:
    assert stops_at([5, None, None, 4], patience=2) == 2
    assert stops_at([None, None], patience=2) == 1


def test_the_reason_names_the_best_step_and_the_settings() -> None:
    choice = EvalConfig(patience=2, min_delta=0.01)
    reason = early_stop(
        [Evaluated(0, 5.0, None), Evaluated(10, 4.0, None), Evaluated(20, 4.5, 3.0), Evaluated(30, 3.995, 2.0)], choice
    )
    assert reason == (
        "2 evaluations in a row did not improve on the validation loss 4.0000 of step 10 by more than eval.min_delta = 0.01 "
        "(eval.patience = 2)"
    )
    assert early_stop([Evaluated(0, None, None)] * 2, choice) == "none of 2 evaluations gave a number (eval.patience = 2)"


@given(evaluations=histories, patience=st.integers(1, 5), min_delta=st.sampled_from([0.0, 0.5]))
def test_without_improvement_counts_the_evaluations_since_the_last_record(
    evaluations: list[Evaluated], patience: int, min_delta: float
) -> None:
    choice = EvalConfig(patience=patience, min_delta=min_delta)
    stale, _ = evaluations_without_gain(evaluations, min_delta)
    assert 0 <= stale <= len(evaluations)
    assert (early_stop(evaluations, choice) is not None) == (stale >= patience)
    if min_delta == 0 and (known := [evaluated.val_loss for evaluated in evaluations if evaluated.val_loss is not None]):
        best = min(range(len(evaluations)), key=lambda number: evaluations[number].val_loss or math.inf)
        assert evaluations[best].val_loss == min(known)
        assert stale == len(evaluations) - 1 - best


@given(evaluations=histories, cut=st.integers(0, 40))
@settings(max_examples=50)
def test_what_is_said_depends_on_the_evaluations_so_far_alone(evaluations: list[Evaluated], cut: int) -> None:
    """So a run that was stopped and goes on says the same, given the same list."""
    choice = EvalConfig(plateau_window=7, patience=4)
    again = [Evaluated(**vars(evaluated)) for evaluated in evaluations[:cut]]
    assert judge_convergence(again, choice) == judge_convergence(evaluations[:cut], choice)
    assert early_stop(again, choice) == early_stop(evaluations[:cut], choice)


@given(losses=st.lists(st.one_of(st.floats(0.1, 10), st.just(math.nan), st.just(math.inf))), cut=st.integers(0, 10))
def test_the_mean_training_loss_goes_on_from_json_with_the_same_bits(losses: list[float], cut: int) -> None:
    whole, first = LossMean(), LossMean()
    for loss in losses:
        whole.add(loss)
    for loss in losses[:cut]:
        first.add(loss)
    resumed = LossMean(LossSums.model_validate_json(json.dumps(first.state.to_json())))
    for loss in losses[cut:]:
        resumed.add(loss)
    known = [loss for loss in losses if math.isfinite(loss)]
    mean = whole.take()
    assert resumed.take() == mean
    assert mean == (pytest.approx(sum(known) / len(known)) if known else None)
    assert whole.take() is None


def test_a_training_loss_that_hardly_falls_is_no_overfitting() -> None:
    evaluations = history(lambda number: 3 + 0.02 * number, lambda number: 3 - 1e-5 * number)
    assert told(evaluations) == []


def test_an_evaluation_that_is_no_number_tells_nothing_again() -> None:
    flat = [Evaluated(number, 3.0, 3.0) for number in range(10)]
    assert [alert.rule for alert in judge_convergence(flat, SETTINGS)] == ["plateau"]
    assert judge_convergence([*flat, Evaluated(10, None, 3.0)], SETTINGS) == []
    assert evaluations_without_gain([*flat, Evaluated(10, None, 3.0)], SETTINGS.min_delta)[0] == 10


def completed(evaluations: list[Evaluated], *, comparable: bool = True, **changes: int) -> EvalEvent:
    last = evaluations[-1]
    loss = math.nan if last.val_loss is None else last.val_loss
    choice = EvalConfig(**changes)  # type: ignore[arg-type]
    return with_convergence(EvalEvent(last.step, loss, 60), evaluations, choice, comparable=comparable)


def test_an_evaluation_has_the_gap_to_the_training_loss_and_the_trend_over_the_window() -> None:
    evaluations = history(lambda number: 5 - 0.1 * number if number < 20 else 3 + 0.02 * (number - 20), lambda _: 2.5, 30)
    event = completed(evaluations)
    assert event.train_loss == 2.5
    assert event.gap == pytest.approx(3.18 - 2.5)
    assert event.trend == pytest.approx(0.02 * 1000 / EVERY)
    assert completed(evaluations, plateau_window=30).trend == pytest.approx(-0.1 * 1000 / EVERY, rel=0.3)


def test_the_first_evaluations_have_no_trend_and_one_without_training_no_gap() -> None:
    evaluations = history(falling, falling, 3)
    assert [completed(evaluations[:end]).trend is None for end in (1, 2, 3)] == [True, True, False]
    assert [completed(evaluations[:end]).gap is None for end in (1, 2, 3)] == [True, False, False]


def test_an_evaluation_that_is_no_number_has_no_gap_and_leaves_the_trend_as_it_was() -> None:
    evaluations = history(lambda number: 4 - 0.1 * number, lambda _: 2.5, 9)
    broken = completed([*evaluations, Evaluated(EVERY * 9, None, 2.5)])
    assert (broken.gap, broken.train_loss) == (None, 2.5)
    assert broken.trend == pytest.approx(-1.0)


def test_a_training_loss_of_another_kind_has_no_gap() -> None:
    event = completed(history(falling, falling, 5), comparable=False)
    assert (event.gap, event.train_loss is None, event.trend is None) == (None, False, False)


@pytest.mark.parametrize(
    ("changes", "custom_loss", "expected"),
    [
        ({}, False, True),
        ({"chunk_tokens": 16}, False, True),
        ({}, True, False),
        ({"label_smoothing": 0.1}, False, False),
        ({"z_loss": 1e-4}, False, False),
        ({"temperature": 2.0}, False, False),
        ({"reduction": "sequences"}, False, False),
    ],
)
def test_losses_are_compared_where_training_minimises_what_evaluations_measure(
    changes: dict[str, float], custom_loss: bool, expected: bool
) -> None:
    assert is_comparable(LossConfig.model_validate(changes), custom_loss=custom_loss) is expected


def test_the_slope_of_a_line_is_its_slope() -> None:
    found = trend([0, 10, 20, 40], [5, 6, 7, 9])
    assert found.slope == pytest.approx(0.1)


def test_a_rise_of_every_pair_has_the_highest_score() -> None:
    found = trend(range(10), [0.1 * number**2 for number in range(10)])
    assert found.score == pytest.approx(45 / np.sqrt(10 * 9 * 25 / 18))


def test_points_at_one_place_have_no_trend() -> None:
    assert (trend([3, 3, 3], [1, 2, 3]).slope, trend([], []).slope, trend([1], [1]).score) == (0.0, 0.0, 0.0)


@given(st.floats(-100, 100), st.integers(0, 2**32 - 1), st.floats(1e3, 1e9))
@settings(max_examples=50)
def test_a_quarter_of_wild_points_does_not_carry_the_slope_away(slope: float, seed: int, wild: float) -> None:
    generator = np.random.default_rng(seed)
    x = np.arange(40.0)
    y = slope * x
    y[generator.choice(40, 10, replace=False)] = generator.uniform(-wild, wild, 10)
    assert trend(list(x), list(y)).slope == pytest.approx(slope, abs=max(1.0, abs(slope)))


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(-1000, 1000)), min_size=2, max_size=30), st.integers(-50, 50))
@settings(max_examples=50)
def test_neither_the_order_of_the_points_nor_their_level_matters(points: list[tuple[int, int]], level: int) -> None:
    x, y = zip(*points, strict=True)
    turned = trend(x[::-1], [value + level for value in y[::-1]])
    assert (turned.slope, turned.score) == pytest.approx((trend(x, y).slope, trend(x, y).score))
