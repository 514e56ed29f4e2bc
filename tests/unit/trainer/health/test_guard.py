import json
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.benchmarks.alarms import NOISES as NOISES_OF_THE_TABLE
from tests.benchmarks.alarms import alarms, higher, is_found, tenfold
from trainer.config import GuardConfig
from trainer.health.guard import Guard, Thresholds, Verdict
from trainer.runs.state import GuardState
from trainer.training.step import within

RULES = ["non_finite", "exploding", "vanishing", "spike", "drop"]
BAD = {"non_finite": (math.nan, 1.0), "exploding": (3.0, 11.0), "vanishing": (3.0, 1e-8), "spike": (30.0, 1.0), "drop": (0.3, 1.0)}
"""Loss and gradient norm with one fault each, beside a healthy (3.0, 1.0)."""

NOISES = ["normal", "hard batches", "odd batches", "relative", "heavy tails"]
NEVER_ONLY_LOGGED = ("non_finite", "log")

Numbers = tuple[float, float]


def judged(guard: Guard, numbers: Iterable[Numbers], first: int = 1) -> list[Verdict]:
    return [guard.judge(step, loss, grad_norm) for step, (loss, grad_norm) in enumerate(numbers, first)]


def settled(healthy_steps: int = 20, *, scaled: bool = False, **options: Any) -> Guard:
    """A guard that has seen steps 1 to `healthy_steps` with a loss of about 3."""
    guard = Guard(GuardConfig(**options), scaled=scaled)
    assert all(verdict == Verdict() for verdict in judged(guard, ((3.0 + 0.02 * (n % 3), 1.0) for n in range(healthy_steps))))
    return guard


def falling_losses(
    seed: int, noise: str, num_steps: int, size: float = 0.05, *, warmup: int = 100, tau: float = 400
) -> Iterator[float]:
    """From 10.8 towards 2.5, slowly at first, as under a warm-up of the learning rate."""
    rng = random.Random(seed)
    for step in range(num_steps):
        progress = step * step / (2 * warmup) if step < warmup else step - warmup / 2
        loss = 2.5 + 8.3 * math.exp(-progress / tau)
        if noise == "normal":
            yield loss + rng.gauss(0, size)
        elif noise == "hard batches":
            yield loss + rng.gauss(0, size) + (rng.random() < 0.01) * rng.choice([-3, 3]) * size
        elif noise == "odd batches":
            yield loss + rng.gauss(0, 0.2 * size) + (rng.random() < 0.01) * rng.choice([-8, 8]) * size
        elif noise == "relative":
            yield loss * math.exp(rng.gauss(0, size))
        else:
            assert noise == "heavy tails"  # Laplace: a hundred times as many draws beyond 4 deviations as normal noise has
            yield loss + rng.choice([-1, 1]) * rng.expovariate(1 / size)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("noise", NOISES)
def test_no_clean_step_raises_an_alarm(noise: str, seed: int) -> None:
    guard = Guard(GuardConfig())
    verdicts = judged(guard, ((loss, 1.0) for loss in falling_losses(seed, noise, 10_000)))
    assert {verdict.message for verdict in verdicts} == {""}


@pytest.mark.parametrize("tau", [10, 40, 150])
def test_a_loss_that_falls_fast_after_a_flat_start_is_no_drop(tau: float) -> None:
    guard = Guard(GuardConfig())
    losses = falling_losses(3, "normal", 600, warmup=200, tau=tau)
    assert {verdict.message for verdict in judged(guard, ((loss, 1.0) for loss in losses))} == {""}


@pytest.mark.parametrize("at", [10, 60, 150, 400, 1500])
@pytest.mark.parametrize("noise", NOISES)
def test_ten_times_the_loss_for_five_steps_is_found_from_the_first_to_the_last(noise: str, at: int) -> None:
    losses = list(falling_losses(4, noise, at + 50))
    losses[at : at + 5] = [10 * loss for loss in losses[at : at + 5]]
    verdicts = judged(Guard(GuardConfig()), ((loss, 1.0) for loss in losses))
    assert [(step, verdict.streak) for step, verdict in enumerate(verdicts) if verdict.rule == "spike"] == [
        (at + n, n + 1) for n in range(5)
    ]
    assert sum(verdict != Verdict() for verdict in verdicts) == 5


def test_three_times_the_loss_is_found_soon_after_a_fast_fall() -> None:
    losses = list(falling_losses(4, "normal", 121, warmup=10, tau=40))
    losses[120] *= 3
    verdicts = judged(Guard(GuardConfig()), ((loss, 1.0) for loss in losses))
    assert [verdict.rule for verdict in verdicts] == [None] * 120 + ["spike"]


@pytest.mark.parametrize("at", [60, 150, 400, 1500])
def test_a_tenth_of_the_loss_is_a_drop_at_once(at: int) -> None:
    losses = list(falling_losses(4, "normal", at + 50))
    losses[at] /= 10
    verdicts = judged(Guard(GuardConfig()), ((loss, 1.0) for loss in losses))
    assert [(step, verdict.rule) for step, verdict in enumerate(verdicts) if verdict.rule] == [(at, "drop")]


def test_a_loss_that_climbs_by_a_third_within_half_a_window_is_a_spike() -> None:
    guard = settled(200)
    verdicts = judged(guard, ((3.0 + 1.0 * n / 64, 1.0) for n in range(65)), first=201)
    assert verdicts[-1].rule == "spike"


def test_a_level_that_doubles_over_many_windows_is_followed() -> None:
    guard = settled(200)
    verdicts = judged(guard, ((3.0 + 3.0 * n / 1000, 1.0) for n in range(1000)), first=201)
    assert {verdict.message for verdict in verdicts} == {""}


@pytest.mark.parametrize("rule", RULES)
def test_each_fault_is_found_at_its_step_with_its_numbers_and_an_advice(rule: str) -> None:
    guard = settled()
    verdict = guard.judge(21, *BAD[rule])
    assert (verdict.rule, verdict.streak) == (rule, 1)
    value = BAD[rule][rule in ("exploding", "vanishing")]
    assert verdict.message.startswith("step 21: ")
    assert f"{value:.6g}" in verdict.message
    assert verdict.message.count(". ") >= 2
    assert guard.judge(22, 3.0, 1.0) == Verdict()


@pytest.mark.parametrize("numbers", [(x, 1.0) for x in (math.nan, math.inf, -math.inf)] + [(3.0, x) for x in (math.nan, math.inf)])
@pytest.mark.parametrize("healthy_steps", [0, 20])
def test_a_number_that_is_not_finite_is_found_from_the_first_step_on(numbers: Numbers, healthy_steps: int) -> None:
    verdict = settled(healthy_steps).judge(healthy_steps + 1, *numbers)
    assert (verdict.action, verdict.rule) == ("skip", "non_finite")


def test_the_limits_of_the_norm_themselves_are_healthy() -> None:
    guard = Guard(GuardConfig(max_grad_norm=5, min_grad_norm=0.5))
    rules = [verdict.rule for verdict in judged(guard, ((3.0, norm) for norm in (5.0, 5.0001, 0.5, 0.4999)))]
    assert rules == [None, "exploding", None, "vanishing"]


@pytest.mark.parametrize("level", [0.0, 1e-9, 2.5, -4.0, 1e300])
def test_a_constant_loss_has_room_for_small_changes(level: float) -> None:
    guard = Guard(GuardConfig())
    small = max(1e-3, abs(level) * 1e-3)
    losses = [level] * 200 + [level + small, level - small] + [level] * 200
    assert {verdict.message for verdict in judged(guard, ((loss, 1.0) for loss in losses))} == {""}
    large = max(1.0, abs(level))
    assert guard.judge(403, level + large, 1.0).rule == "spike"
    assert guard.judge(404, level - large, 1.0).rule == "drop"


def found_spikes(losses: Iterable[float]) -> list[int]:
    """The steps at which the guard reports a spike. Any other verdict fails."""
    verdicts = judged(Guard(GuardConfig()), ((float(loss), 1.0) for loss in losses))
    assert {verdict.rule for verdict in verdicts} <= {None, "spike"}
    return [step for step, verdict in enumerate(verdicts, 1) if verdict.rule]


def noisy(levels: Iterable[float], noise: float, seed: int) -> list[float]:
    """Losses with normal noise of this share of their level."""
    rng = random.Random(seed)
    return [level * (1 + rng.gauss(0, noise)) for level in levels]


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.01])
def test_an_isolated_loss_that_is_higher_by_0_6_nats_at_3_nats_is_a_spike(noise: float) -> None:
    for seed in range(50):
        losses = noisy([3.0] * 151, noise, seed)
        losses[150] += 0.6
        assert found_spikes(losses) == [151]


@pytest.mark.parametrize("level", [0.5, 3.0])
@pytest.mark.parametrize("noise", [0.001, 0.005, 0.01, 0.02, 0.05])
def test_a_divergence_to_more_than_three_times_the_loss_over_1000_steps_is_found_within_100(noise: float, level: float) -> None:
    climb = [level * (1 + 7 / 3 * n / 1000) for n in range(100)]
    for seed in range(2):
        steps = found_spikes(noisy([level] * 300 + climb, noise, seed))
        assert steps[:1] > [300]


def test_a_divergence_after_a_fall_is_found_too() -> None:
    losses = [*falling_losses(5, "normal", 1200), *noisy((2.6 + 0.007 * n for n in range(100)), 0.01, 5)]
    assert found_spikes(losses)[:1] > [1200]


@pytest.mark.parametrize("noise", [0.001, 0.005, 0.02, 0.05])
def test_normal_noise_is_no_spike_at_any_level(noise: float) -> None:
    for level in (0.5, 3.0, 11.0):
        assert found_spikes(noisy([level] * 500, noise, seed=1)) == []


@pytest.mark.parametrize(("noise", "most"), [("AR(1) 0.95, sd 0.25", 1), ("log-normal, sd 0.25", 1), ("Student t(3), sd 0.25", 3)])
def test_correlated_and_heavy_tailed_noise_has_few_false_alarms(noise: str, most: int) -> None:
    draw, deviation = NOISES_OF_THE_TABLE[noise]
    assert len(alarms(3 + deviation * draw(np.random.default_rng(0), 4000))) <= most


def test_most_isolated_losses_that_are_higher_by_six_deviations_are_found_at_their_step() -> None:
    assert sum(is_found("normal, sd 0.1", seed, 1000, higher) for seed in range(20)) >= 16


def test_ten_times_the_loss_is_found_in_heavy_tailed_noise() -> None:
    assert all(is_found("log-normal, sd 0.25", seed, 300, tenfold) for seed in range(10))


def test_a_memory_of_an_earlier_version_is_continued() -> None:
    guard, earlier = settled(200), settled(200).state.to_json()
    del earlier["tail"]
    guard.restore(GuardState.model_validate(earlier))
    assert guard.judge(201, 3.0, 1.0) == Verdict()
    assert guard.judge(202, *BAD["spike"]).rule == "spike"


@pytest.mark.long
@pytest.mark.parametrize("noise", [0.005, 0.01, 0.02, 0.05])
def test_40_000_steps_of_normal_noise_have_no_spike(noise: float) -> None:
    assert found_spikes(noisy([3.0] * 40_000, noise, seed=2)) == []


def test_losses_of_short_and_noisy_starts_are_no_spikes() -> None:
    for seed in range(100):
        assert found_spikes(noisy([5.5] * 30, 0.05, seed)) == []


@pytest.mark.parametrize("begin", range(1, 9))
@pytest.mark.parametrize("growth", [1.15, 1.5, 3.0])
def test_a_run_that_diverges_in_its_first_ten_steps_is_found_there(begin: int, growth: float) -> None:
    losses = [5.55 * (1 + 0.01 * (n % 2)) * growth ** max(0, n - begin) for n in range(1, 13)]
    found = found_spikes(losses)
    assert begin < found[0] <= max(begin + 4, 10 if growth < 1.5 else 3)


def test_the_first_steps_of_runs_without_warm_up_are_judged_by_whether_they_diverge() -> None:
    """Recorded with two layers, width 32, AdamW, no warm-up, at learning rates of 0.1, 0.3 and 1."""
    fast = [5.76, 4.08, 3.04, 2.75, 3.74, 3.22, 3.18, 2.87, 2.64, 2.77, 2.77, 2.72, 2.6, 2.67]
    spiking = [5.76, 4.9, 4.98, 15.73, 6.68, 5.26, 4.45, 3.67, 2.96, 4.0, 3.67, 3.22, 2.74, 2.86]
    diverging = [5.76, 11.84, 25.9, 14.0, 15.62, 32.1, 27.22, 24.78, 21.8, 28.13, 26.55, 26.65, 24.84, 18.18]
    assert [found_spikes(losses)[:1] for losses in (fast, spiking, diverging)] == [[], [4], [3]]


def test_drops_are_judged_from_the_tenth_step_on_and_spikes_from_the_third() -> None:
    assert settled(8).judge(9, *BAD["drop"]) == Verdict()
    assert settled(9).judge(10, *BAD["drop"]).rule == "drop"
    assert settled(1).judge(2, *BAD["spike"]) == Verdict()
    assert settled(2).judge(3, *BAD["spike"]).rule == "spike"


def test_noise_widens_the_range() -> None:
    quiet, noisy = settled(), Guard(GuardConfig())
    judged(noisy, ((3.0 + 0.5 * (n % 2), 1.0) for n in range(20)))
    assert (quiet.judge(21, 5.0, 1.0).rule, noisy.judge(21, 5.0, 1.0).rule) == ("spike", None)


@pytest.mark.parametrize("rule", ["spike", "drop"])
def test_a_bad_loss_does_not_become_normal_until_it_has_lasted_for_a_whole_window(rule: str) -> None:
    guard = settled(loss_window=32)
    bad = [guard.judge(21 + n, *BAD[rule]) for n in range(32)]
    assert {(verdict.action, verdict.rule) for verdict in bad} == {("log", rule)}
    assert ["counts as normal" in verdict.message for verdict in bad] == [False] * 31 + [True]
    after = judged(guard, [BAD[rule]] * 40, first=53)
    assert [verdict.rule for verdict in after] == [rule] + [None] * 39  # one more, which a host one step late judges as well
    assert guard.judge(93, 3.0, 1.0).rule == ("drop" if rule == "spike" else "spike")


def test_a_skipped_step_leaves_no_trace_in_what_is_expected() -> None:
    skipping, never = settled(exploding="skip"), settled()
    judged(skipping, [(3.5, 11.0)] * 10, first=21)
    expected = [skipping.judge(40, 30.0, 1.0).message, never.judge(40, 30.0, 1.0).message]
    assert expected[0] == expected[1]


def test_a_large_norm_that_is_only_logged_keeps_the_guard_seeing_losses() -> None:
    guard = Guard(GuardConfig())
    assert {verdict.rule for verdict in judged(guard, [(3.0, 50.0)] * 20)} == {"exploding"}
    verdict = guard.judge(21, 30.0, 50.0)
    assert verdict.rule == "spike"
    assert "gradient norm 50" in verdict.message


@pytest.mark.parametrize(
    ("rule", "action"),
    [(rule, action) for rule in RULES for action in ("log", "skip", "rollback", "stop") if (rule, action) != NEVER_ONLY_LOGGED],
)
def test_each_fault_leads_to_the_action_that_is_set_for_it(rule: str, action: str) -> None:
    options: dict[str, Any] = {rule: action}
    assert settled(**options).judge(21, *BAD[rule]).action == action


def test_of_two_faults_the_graver_action_is_taken_and_both_are_told() -> None:
    verdict = settled(exploding="rollback").judge(21, 30.0, 11.0)
    assert (verdict.action, verdict.rule) == ("rollback", "exploding")
    assert "loss 30" in verdict.message
    assert "gradient norm 11" in verdict.message


def test_more_skips_in_a_row_than_allowed_stop_the_run_and_a_healthy_step_starts_the_count_again() -> None:
    guard = settled(max_skips=3, exploding="skip")
    bad = [BAD["non_finite"], BAD["exploding"], BAD["non_finite"]]
    numbers = [*bad, (3.0, 1.0), *bad, BAD["exploding"]]
    actions = [verdict.action for verdict in judged(guard, numbers, first=21)]
    assert actions == ["skip", "skip", "skip", "none", "skip", "skip", "skip", "stop"]


def test_more_rollbacks_than_allowed_stop_the_run_though_each_brings_an_older_memory_back() -> None:
    guard = settled(spike="rollback", max_rollbacks=2, rollback_lr_factor=0.5)
    checkpoint = guard.state
    for number in range(2):
        assert (guard.rollbacks, guard.lr_factor) == (number, 0.5**number)
        assert guard.judge(21, *BAD["spike"]).action == "rollback"
        guard.after_rollback(checkpoint)
    verdict = guard.judge(21, *BAD["spike"])
    assert (verdict.action, verdict.rule) == ("stop", "spike")
    assert "guard.max_rollbacks = 2" in verdict.message


def test_after_a_rollback_a_guard_judges_as_one_that_was_never_beyond_the_checkpoint() -> None:
    straight, back = settled(), settled()
    checkpoint = back.state
    judged(back, [(3.4, 1.0)] * 30 + [BAD["exploding"]] * 2, first=21)
    back.after_rollback(checkpoint)
    assert back.state == straight.state.model_copy(update={"rollbacks": 1})


def test_an_overflow_under_a_scaled_loss_is_a_skip_whatever_is_set_and_still_bounded() -> None:
    guard = settled(scaled=True, non_finite="stop", max_skips=2)
    assert [verdict.action for verdict in judged(guard, [(3.0, math.inf)] * 3, first=21)] == ["skip", "skip", "stop"]
    assert settled(scaled=True, non_finite="stop").judge(21, math.nan, math.nan).action == "stop"
    assert settled(scaled=False, non_finite="stop").judge(21, 3.0, math.inf).action == "stop"


def test_a_fault_that_lasts_is_news_at_ever_longer_distances_and_a_stop_always() -> None:
    verdicts = judged(settled(exploding="log"), [BAD["exploding"]] * 20, first=21)
    assert [number for number, verdict in enumerate(verdicts, 1) if verdict.is_news] == [3, 6, 12], "single gradients are clipped"
    assert not Verdict().is_news
    guard = settled(max_skips=2)
    assert [verdict.is_news for verdict in judged(guard, [BAD["non_finite"]] * 3, first=21)] == [True, True, True]


def test_limits_of_the_norm_that_leave_nothing_healthy_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"every gradient would break a rule, so lower guard\.min_grad_norm"):
        GuardConfig(min_grad_norm=1.0, max_grad_norm=1.0)


# Losses near a level, far from it, and not finite; norms within, at and beyond the limits.
LOSSES = st.one_of(st.floats(2.9, 3.1), st.floats(-1e308, 1e308), st.sampled_from([math.nan, math.inf, 3.0, 30.0, 0.1]))
NORMS = st.one_of(st.floats(0.1, 5.0), st.sampled_from([0.0, 1e-8, 1e-7, 10.0, 10.5, math.inf, math.nan]))
STREAMS = st.lists(st.tuples(LOSSES, NORMS), max_size=60)
ACTIONS = st.sampled_from(["log", "skip", "rollback", "stop"])
CONFIGS = st.builds(
    GuardConfig,
    **{rule: ACTIONS for rule in RULES if rule != "non_finite"},
    non_finite=st.sampled_from(["skip", "rollback", "stop"]),
    loss_window=st.integers(8, 12),
    max_skips=st.integers(0, 3),
    max_rollbacks=st.integers(0, 2),
)


@given(config=CONFIGS, healthy=st.integers(0, 20), stream=STREAMS, cut=st.integers(0, 80))
@example(config=GuardConfig(spike="log", loss_window=8), healthy=20, stream=[(30.0, 1.0)] * 30, cut=28)
@settings(max_examples=150)
def test_a_resume_at_any_step_continues_with_the_same_verdicts(
    config: GuardConfig, healthy: int, stream: list[Numbers], cut: int
) -> None:
    numbers = [(3.0 + 0.01 * (n % 4), 1.0) for n in range(healthy)] + stream
    straight, before, after = Guard(config), Guard(config), Guard(config)
    for guard in (straight, before):
        guard.after_rollback(guard.state)
    expected = judged(straight, numbers)
    verdicts = judged(before, numbers[:cut])
    text = json.dumps(before.state.to_json(), allow_nan=False)
    after.restore(GuardState.model_validate_json(text))
    verdicts += judged(after, numbers[cut:], first=len(numbers[:cut]) + 1)
    assert verdicts == expected
    assert after.state == straight.state


@given(config=CONFIGS, healthy=st.integers(0, 20), stream=STREAMS)
@example(config=GuardConfig(spike="log", drop="skip", loss_window=8), healthy=20, stream=[(30.0, 1.0)] * 12)
@settings(max_examples=150)
def test_thresholds_are_the_same_whether_results_are_read_at_once_or_one_step_late(
    config: GuardConfig, healthy: int, stream: list[Numbers]
) -> None:
    numbers = [(3.0 + 0.01 * (n % 4), 1.0) for n in range(healthy)] + stream
    prompt, late = Guard(config), Guard(config)
    for step, (loss, grad_norm) in enumerate(numbers, 1):
        limits = prompt.thresholds(step)
        assert late.thresholds(step) == limits
        prompt.judge(step, loss, grad_norm)
        if step > 1:
            late.judge(step - 1, *numbers[step - 2])


def withholds(limits: Thresholds, loss: float, grad_norm: float) -> bool:
    """Return whether a step withholds its update, as its device decides."""
    return not within(limits, torch.tensor(loss, dtype=torch.float64), torch.tensor(grad_norm, dtype=torch.float64))


@given(healthy=st.integers(0, 20), stream=STREAMS)
@settings(max_examples=150)
def test_the_step_and_the_guard_agree_on_which_updates_are_withheld(healthy: int, stream: list[Numbers]) -> None:
    guard = Guard(GuardConfig(exploding="skip", vanishing="skip", spike="skip", drop="skip", max_skips=1000, loss_window=8))
    numbers = [(3.0 + 0.01 * (n % 4), 1.0) for n in range(healthy)] + stream
    for step, (loss, grad_norm) in enumerate(numbers, 1):
        withheld = withholds(guard.thresholds(step), loss, grad_norm)
        assert (guard.judge(step, loss, grad_norm).action == "skip") == withheld


def test_without_skips_set_only_numbers_that_are_not_finite_withhold_an_update() -> None:
    limits = settled().thresholds(21)
    assert limits == Thresholds()
    assert not withholds(limits, 1e300, 1e300)
    assert [withholds(limits, loss, norm) for loss, norm in ((math.nan, 1.0), (3.0, math.inf), (-math.inf, 1.0))] == [True] * 3


def test_a_memory_of_a_longer_window_keeps_its_newest_losses() -> None:
    wide, narrow = settled(100), Guard(GuardConfig(loss_window=8))
    narrow.restore(wide.state)
    assert narrow.state.steps == list(range(92, 101))


def test_a_spike_is_as_many_deviations_and_as_large_a_share_as_are_set() -> None:
    losses = noisy([3.0] * 150, 0.02, seed=3)

    def is_spike(excess: float, **options: float) -> bool:
        guard = Guard(GuardConfig(**options))  # type: ignore[arg-type]
        judged(guard, ((loss, 1.0) for loss in losses))
        return guard.judge(151, 3.0 + excess, 1.0).rule == "spike"

    assert [is_spike(0.5, spike_factor=factor, spike_floor=0.01) for factor in (5, 12)] == [True, False]
    assert [is_spike(0.5, spike_factor=5, spike_floor=floor) for floor in (0.12, 0.2)] == [True, False]
