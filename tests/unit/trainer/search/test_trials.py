"""The rules that end a trial early, and the best trial."""

from __future__ import annotations

import math

from trainer.search.study import Trial, best_of, is_pruned


def trial(number: int, *losses: float, state: str = "finished") -> Trial:
    curve = {10 * (place + 1): loss for place, loss in enumerate(losses)}
    return Trial.model_validate({"trial": number, "values": {}, "state": state, "loss": min(losses), "losses": curve})


def test_the_median_rule_needs_four_finished_trials_and_compares_at_the_same_step() -> None:
    others = [trial(0, 5.0, 1.0), trial(1, 4.0, 1.0), trial(2, 3.0, 1.0)]
    assert is_pruned("median", {10: 9.0}, others, 10, 10) == ""
    others.append(trial(3, 4.5, 1.0))
    assert "above the median 4.2500 of 4 trials" in is_pruned("median", {10: 4.3}, others, 10, 10)
    assert is_pruned("median", {10: 4.2}, others, 10, 10) == ""
    assert is_pruned("median", {10: 4.3}, others, 10, 20) == ""
    assert is_pruned("median", {10: 4.0, 20: 9.0}, others, 20, 10)
    assert is_pruned("none", {10: 9.0}, others, 10, 10) == ""


def test_the_median_rule_ignores_trials_that_have_not_finished() -> None:
    others = [trial(number, 1.0, state=state) for number, state in enumerate(["finished", "pruned", "running", "failed"])]
    assert is_pruned("median", {10: 9.0}, others, 10, 10) == ""


def test_the_lowest_loss_so_far_decides_and_a_loss_that_is_no_number_is_the_worst() -> None:
    others = [trial(number, 4.0, 4.0) for number in range(4)]
    assert is_pruned("median", {10: 3.0, 20: 9.0}, others, 20, 10) == ""
    assert is_pruned("median", {10: math.nan}, others, 10, 10)


def test_asha_keeps_the_best_third_at_its_rungs() -> None:
    others = [trial(number, 1.0 + number, 1.0 + number, 1.0 + number) for number in range(5)]
    assert is_pruned("asha", {10: 2.0}, others, 10, 10) == ""
    assert "best 2 of 6" in is_pruned("asha", {10: 2.5}, others, 10, 10)
    assert is_pruned("asha", {10: 9.0, 20: 9.0}, others, 20, 10) == ""
    assert is_pruned("asha", {10: 9.0, 20: 9.0, 30: 9.0}, others, 30, 10)
    assert is_pruned("asha", {10: 9.0}, [], 10, 10) == ""


def test_the_best_trial_is_finished_and_the_first_of_equals() -> None:
    assert best_of([trial(0, 1.0, state="pruned"), trial(1, 2.0), trial(2, 2.0)]) == trial(1, 2.0)
    assert best_of([trial(0, 1.0, state="failed")]) is None


def test_a_rung_in_the_warm_up_would_end_the_trial_that_is_best_after_it() -> None:
    short, long = {10: 3.0, 20: 2.8, 30: 2.7}, {10: 4.0, 20: 3.0, 30: 2.1}  # warm-ups of 5 and of 25 steps
    others = [Trial(number=0, values={}, state="finished", loss=2.7, losses=short)]
    assert is_pruned("asha", {10: long[10]}, others, 10, 10)
    assert is_pruned("asha", long, others, 30, 30) == ""
