import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_metrics import step_metrics
from trainer.config import AlertAction, AlertsConfig, GuardConfig
from trainer.distributed.stragglers import SlowRank
from trainer.health.alert_rules import LASTING_FALL_S, AlertRules, Debounce, IdleShare, MemoryTrend, SpeedDrop, WaitShare
from trainer.health.guard import Guard, guard_alert
from trainer.machine.sampler import GpuReading, HardwareReading, HostReading
from trainer.runs.events import AlertEvent
from trainer.runs.rules import RULES

HOST = HostReading(rss_mib=1500.0, private_mib=1000.0, available_mib=16000.0, cpu=0.5, disk_free_gb=100.0)
GPU = GpuReading(
    0, "NVIDIA H100 80GB HBM3", temperature_c=70.0, sm_clock_mhz=1980.0, throttle=(), ecc_corrected=0, ecc_uncorrected=0
)
SLOW = SlowRank(rank=3, factor=2.5, phase="compute", seconds=0.5, others_s=0.2)


def rules(**changes: object) -> AlertRules:
    return AlertRules(AlertsConfig.model_validate(changes))


def told(found: Iterable[Sequence[AlertEvent]]) -> list[tuple[str, int]]:
    return [(alert.rule, alert.step) for alerts in found for alert in alerts]


def paced(watch: AlertRules, rates: Iterable[float], waits: Iterable[float] | None = None, first: int = 1) -> list[tuple[str, int]]:
    """The alerts of steps of 1,000 tokens with these rates and shares of waiting."""
    rates = list(rates)
    waits = [0.0] * len(rates) if waits is None else waits
    return told(
        watch.after_step(step_metrics(step, seconds=1000 / rate, loader_wait_s=wait * 1000 / rate, tokens_per_s=rate))
        for step, (rate, wait) in enumerate(zip(rates, waits, strict=True), first)
    )


def with_gpu(**changes: object) -> HardwareReading:
    return HardwareReading((replace(GPU, **changes),), HOST)  # type: ignore[arg-type]


def with_host(**changes: object) -> HardwareReading:
    return HardwareReading((GPU,), replace(HOST, **changes))  # type: ignore[arg-type]


def readings(watch: AlertRules, series: Iterable[HardwareReading], every: int = 10, first: int = 1) -> list[tuple[str, int]]:
    return told(watch.after_reading(every * number, reading) for number, reading in enumerate(series, first))


def test_a_trouble_that_lasts_is_told_once_and_again_after_it_was_over() -> None:
    debounce = Debounce(onset=2, recovery=3)
    states = "..b.bbbb..b...bb."
    assert [place for place, state in enumerate(states) if debounce.begins(bad=state == "b")] == [5, 15]


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 5), st.integers(1, 5))
def test_between_two_reports_there_was_a_whole_recovery(states: list[bool], onset: int, recovery: int) -> None:
    debounce = Debounce(onset, recovery)
    reports = [place for place, bad in enumerate(states) if debounce.begins(bad=bad)]
    for place in reports:
        assert place + 1 >= onset
        assert all(states[place + 1 - onset : place + 1])
    for first, second in pairwise(reports):
        good = [not bad for bad in states[first + 1 : second]]
        assert any(all(good[start : start + recovery]) for start in range(len(good) - recovery + 1))


def test_waiting_for_data_is_told_at_the_step_at_which_its_share_is_too_high() -> None:
    watch = WaitShare(10, 0.2)
    shares = [watch.observe(1.0, 0.0 if step < 20 else 0.5) for step in range(40)]
    assert [step for step, share in enumerate(shares) if share is not None] == [24]
    assert shares[24] == pytest.approx(0.25)


def test_a_share_that_trembles_about_its_limit_is_one_debounce() -> None:
    watch = WaitShare(10, 0.2)
    shares = [watch.observe(1.0, 0.21 if step // 10 % 2 else 0.19) for step in range(200)]
    assert sum(share is not None for share in shares) == 1


def test_a_first_window_that_is_not_full_says_nothing_of_waiting() -> None:
    watch = WaitShare(10, 0.2)
    assert all(watch.observe(1.0, 0.9) is None for _ in range(9))
    assert watch.observe(1.0, 0.9) == pytest.approx(0.9)


def test_a_fall_of_the_speed_is_told_when_most_of_the_last_ten_steps_are_slow() -> None:
    watch = SpeedDrop(50, 0.3, least_s=0)
    found = [watch.observe(1000.0 if step < 100 else 600.0, 1.0) for step in range(200)]
    assert [step for step, drop in enumerate(found) if drop] == [105]
    assert found[105] == (600.0, 1000.0)


def test_the_speed_may_fall_again_after_it_was_well() -> None:
    watch = SpeedDrop(50, 0.3, least_s=0)
    rates = [1000.0] * 100 + [500.0] * 300 + [1000.0] * 50 + [500.0] * 20
    assert [step for step, rate in enumerate(rates) if watch.observe(rate, 1.0)] == [105, 455]


@given(st.lists(st.tuples(st.integers(15, 290), st.integers(15, 60)), max_size=8))
def test_falls_that_other_programs_cause_for_less_than_five_minutes_are_no_alert(phases: list[tuple[int, int]]) -> None:
    watch = SpeedDrop(50, 0.3)
    rates = [1000.0] * 100 + [rate for slow, fast in phases for rate in [400.0] * slow + [1000.0] * fast]
    assert not any(watch.observe(rate, 1.0) for rate in rates)


@pytest.mark.parametrize("seconds", [0.01, 1.0, 40.0])
def test_a_fall_that_lasts_is_told_after_five_minutes_however_long_a_step_is(seconds: float) -> None:
    watch, slow = SpeedDrop(50, 0.3), 0.0
    for step in range(40_000):
        rate = 1000.0 if step < 300 else 500.0
        slow += seconds if step >= 305 else 0.0
        if watch.observe(rate, seconds):
            assert slow == pytest.approx(LASTING_FALL_S, abs=1.01 * seconds)
            return
    pytest.fail("the fall was not told")


@pytest.mark.parametrize("slow_steps", [[150], [150, 160, 170, 180], list(range(150, 154))])
def test_single_slow_steps_are_no_fall_of_the_speed(slow_steps: list[int]) -> None:
    watch = SpeedDrop(50, 0.3, least_s=0)
    assert not any(watch.observe(50.0 if step in slow_steps else 1000.0, 1.0) for step in range(300))


def test_a_run_that_grows_faster_is_never_told_to_be_slow() -> None:
    watch = SpeedDrop(50, 0.3)
    assert not any(watch.observe(100.0 + 10 * step, 1.0) for step in range(500))


@given(st.integers(0, 2**32 - 1), st.floats(1, 200), st.integers(1, 2000))
@settings(max_examples=30)
def test_noise_in_the_memory_is_no_leak(seed: int, spread: float, steps_each: int) -> None:
    generator = np.random.default_rng(seed)
    watch = MemoryTrend(100.0)
    memory = 2000 + spread * generator.standard_normal(150)
    assert all(watch.observe(steps_each * number, value) is None for number, value in enumerate(memory))


@given(st.integers(0, 2**32 - 1), st.floats(200, 20_000), st.integers(10, 500))
@settings(max_examples=30)
def test_memory_that_grows_is_a_leak_told_once(seed: int, mb_per_1000: float, steps_each: int) -> None:
    generator = np.random.default_rng(seed)
    watch = MemoryTrend(100.0)
    step_mib = mb_per_1000 / 1000 * 1e6 / 2**20
    count = 66 + int(200 / (step_mib * steps_each))
    limit = step_mib * steps_each
    grown = [2000 + step_mib * steps_each * number + limit * generator.standard_normal() for number in range(max(count, 80))]
    found = [watch.observe(steps_each * number, value) for number, value in enumerate(grown)]
    reports = [growth for growth in found if growth is not None]
    if limit * 60 > 80:
        assert len(reports) == 1
        assert reports[0] == pytest.approx(mb_per_1000, rel=0.2)
    else:
        assert len(reports) <= 1


def test_memory_that_is_taken_at_the_start_and_then_kept_is_no_leak() -> None:
    watch = MemoryTrend(100.0)
    memory = [100.0 * min(number, 6) + 1000 for number in range(100)]
    assert all(watch.observe(100 * number, value) is None for number, value in enumerate(memory))


def test_a_small_growth_is_no_leak_however_steady() -> None:
    watch = MemoryTrend(1.0)
    assert all(watch.observe(number, 1000 + 0.5 * number) is None for number in range(100))


def test_readings_before_a_rollback_do_not_hide_a_leak_after_it() -> None:
    watch = MemoryTrend(100.0)
    found = [watch.observe(100 * number, 1000 + 30.0 * number) for number in range(30)]
    assert found == [None] * 30
    after = [watch.observe(100 * number, 1900 + 30.0 * number) for number in range(36)]
    assert after[:29] == [None] * 29
    assert watch.mb_per_1000_steps == pytest.approx(300 * 2**20 / 1e6)
    assert [growth for growth in after if growth is not None] == [pytest.approx(300 * 2**20 / 1e6)]


def test_the_trend_of_the_memory_is_known_once_there_are_enough_readings() -> None:
    watch = rules()
    leaking = [with_host(private_mib=1000.0 + 2 * number) for number in range(36)]
    readings(watch, leaking[:35])
    assert watch.memory_trend is None
    readings(watch, leaking[35:], first=36)
    assert watch.memory_trend is not None


def test_slowing_down_because_of_heat_is_told_at_the_second_reading() -> None:
    cool, hot = with_gpu(), with_gpu(throttle=("sw_thermal", "power_cap"), temperature_c=88.0, sm_clock_mhz=1200.0)
    assert readings(rules(), [cool, hot, cool, hot, hot, hot, cool, cool, cool, hot, hot]) == [
        ("throttling", 50),
        ("throttling", 110),
    ]
    watch = rules()
    watch.after_reading(1, hot)
    [alert] = watch.after_reading(2, hot)
    assert alert.message == (
        "step 2: GPU 0 (NVIDIA H100 80GB HBM3) slows itself down at 88 °C, clock 1200 MHz: sw_thermal. "
        "Look at its cooling and power supply"
    )


def test_a_gpu_at_its_power_cap_or_idle_does_what_it_was_built_for() -> None:
    assert readings(rules(), [with_gpu(throttle=("power_cap", "idle", "application_clocks"))] * 5) == []


def test_an_uncorrected_error_is_told_at_once_and_each_further_one_again() -> None:
    counts = [7, 7, 8, 8, 10]
    watch = rules()
    assert readings(watch, [with_gpu(ecc_uncorrected=count) for count in counts]) == [("ecc", 30), ("ecc", 50)]


def test_corrected_errors_are_news_by_the_hundred() -> None:
    counts = [40, 90, 139, 140, 200, 239, 240]
    assert readings(rules(), [with_gpu(ecc_corrected=count) for count in counts]) == [("ecc", 40), ("ecc", 70)]


def test_a_counter_that_begins_anew_is_no_error() -> None:
    assert readings(rules(), [with_gpu(ecc_uncorrected=count) for count in (5, 0, 0)]) == []


def test_a_gpu_that_does_not_tell_its_errors_has_none() -> None:
    assert readings(rules(), [with_gpu(ecc_uncorrected=None, ecc_corrected=None, throttle=None)] * 3) == []


def test_an_xid_is_told_with_its_number() -> None:
    [alert] = rules().after_reading(4, HardwareReading((GPU,), HOST, xids=(79, 79, 48)))
    assert (alert.rule, alert.severity) == ("xid", "critical")
    assert "Xid 48, 79" in alert.message


def test_a_lost_gpu_is_told_once() -> None:
    lost = HardwareReading((GPU, GpuReading(1, "NVIDIA H100 80GB HBM3", answers=False)), HOST)
    assert readings(rules(), [with_gpu(), lost, lost, lost]) == [("gpu_lost", 20)]


def test_a_disk_that_trembles_about_its_limit_is_told_once() -> None:
    free = [10.0, 4.9, 5.1, 4.9, 6.0, 4.0, 6.5, 4.9]
    assert readings(rules(), [with_host(disk_free_gb=value) for value in free]) == [("disk", 20), ("disk", 80)]


def busy(shares: Iterable[float], every_s: float = 10.0) -> list[HardwareReading]:
    """Readings of two GPUs whose mean utilisation is each of these shares."""
    pairs = [(share - 0.05, share + 0.05) for share in shares]
    return [
        HardwareReading(
            (replace(GPU, utilisation=low), replace(GPU, index=1, utilisation=high)), HOST, taken_s=1000 + every_s * number
        )
        for number, (low, high) in enumerate(pairs)
    ]


def test_gpus_that_are_idle_for_minutes_are_told_once_with_the_loader_s_wait_beside_it() -> None:
    watch = rules(gpu_utilisation_minutes=3, loader_wait="off")
    paced(watch, [1000.0] * 50, [0.4] * 50)
    series = busy([0.9] * 30 + [0.5] * 40)
    found = [alert for number, reading in enumerate(series) for alert in watch.after_reading(10 + number, reading)]
    [alert] = found
    assert (alert.rule, alert.threshold, alert.action) == ("gpu_utilisation", 0.7, "log")
    assert alert.step == 10 + 30 + 9  # 9 of the last 18 readings at 50 % and 9 at 90 % are 70 %
    assert alert.value == pytest.approx(0.7 - 0.4 / 18, abs=0.03)
    assert "busy for 68% of the last 3 minutes" in alert.message
    assert "waited for data for 40% of their time" in alert.message


def test_idle_gpus_are_told_again_only_after_they_were_busy() -> None:
    watch = rules(gpu_utilisation_minutes=2)
    shares = [0.5] * 20 + [0.72] * 30 + [0.5] * 20 + [0.9] * 30 + [0.5] * 20
    assert [rule for rule, _ in readings(watch, busy(shares))] == ["gpu_utilisation"] * 2


@pytest.mark.parametrize("utilisation", [0.71, 1.0, None])
def test_busy_gpus_and_gpus_that_do_not_say_are_no_alert(utilisation: float | None) -> None:
    series = [replace(reading, gpus=(replace(GPU, utilisation=utilisation),)) for reading in busy([0.0] * 100)]
    assert readings(rules(), series) == []


def test_gpus_that_wait_while_the_run_starts_or_for_less_than_the_minutes_are_no_alert() -> None:
    watch = rules(gpu_utilisation_minutes=5)
    starting = busy([0.0] * 60)
    assert all(watch.after_reading(700, reading) == [] for reading in starting)  # a resumed run
    after = [
        replace(reading, taken_s=2000 + 10.0 * number) for number, reading in enumerate(busy([1.0] * 40 + [0.0] * 8 + [1.0] * 40))
    ]
    assert readings(watch, after, first=71) == []


def test_a_mean_over_too_few_readings_is_none() -> None:
    watch = IdleShare(60, 0.3)
    found = [watch.observe(500 + number, 20.0 * number, 1.0) for number in range(20)]
    assert found == [None] * 20
    closer = IdleShare(60, 0.3)
    assert [number for number in range(20) if closer.observe(500 + number, 12.0 * number, 1.0)] == [8]  # 3 steps and 60 s


def growing_gpu(mib_each: float, count: int, *, index: int = 0) -> list[HardwareReading]:
    return [with_gpu(index=index, memory_used_mib=20_000 + mib_each * number, memory_total_mib=81_559.0) for number in range(count)]


def test_gpu_memory_that_grows_is_told_once_with_its_gpu() -> None:
    watch = rules(gpu_memory_mb=200)
    found = [
        alert for number, reading in enumerate(growing_gpu(5, 120, index=3)) for alert in watch.after_reading(10 * number, reading)
    ]
    [alert] = found
    assert (alert.rule, alert.step, alert.threshold) == ("gpu_memory", 590, 200.0)  # 30 readings of warm-up and 30 of the trend
    assert alert.value == pytest.approx(500 * 2**20 / 1e6)
    assert "GPU 3 (NVIDIA H100 80GB HBM3): its used memory grows by 524 MB per 1,000 steps" in alert.message
    assert "of 85,521 MB are used" in alert.message
    assert watch.gpu_memory_trends == {3: pytest.approx(500 * 2**20 / 1e6)}


@pytest.mark.parametrize(
    "used", [[20_000.0] * 120, [20_000.0 + 100 * min(number, 29) for number in range(120)], [20_000.0, 22_000.0] * 60, [None] * 120]
)
def test_gpu_memory_that_does_not_grow_for_long_is_no_alert(used: list[float | None]) -> None:
    assert readings(rules(), [with_gpu(memory_used_mib=mib) for mib in used]) == []


def test_the_rules_about_gpus_can_be_switched_off() -> None:
    idle = [replace(reading, gpus=growing_gpu(50, 1 + number)[-1].gpus) for number, reading in enumerate(busy([0.1] * 120))]
    idle = [replace(reading, gpus=(replace(reading.gpus[0], utilisation=0.1),)) for reading in idle]
    assert {rule for rule, _ in readings(rules(), idle)} == {"gpu_utilisation", "gpu_memory"}
    assert readings(rules(gpu_utilisation="off", gpu_memory="off"), idle) == []


def test_a_slow_rank_and_a_plateau_are_alerts_too() -> None:
    [slow] = rules().slow_rank(9, SLOW)
    assert (slow.rule, slow.value, slow.action) == ("slow_rank", 2.5, "log")
    assert "rank 3 is slow" in slow.message
    flat = AlertEvent("plateau", 500, "warning", "step 500: flat", "log", 0.0002, 0.001)
    assert rules().configured(flat) == [flat]
    assert rules(plateau="off").configured(flat) == []


def test_a_rule_that_is_off_says_nothing_and_one_that_stops_says_so() -> None:
    assert rules(slow_rank="off").slow_rank(1, SLOW) == []
    assert readings(rules(gpu_errors="off"), [HardwareReading((replace(GPU, answers=False),), HOST, xids=(79,))]) == []
    [alert] = rules(disk="stop").after_reading(1, with_host(disk_free_gb=1.0))
    assert (alert.action, alert.severity) == ("stop", "critical")
    assert alert.message.endswith("Training stops, because alerts.disk = stop")


@pytest.mark.parametrize(
    ("loss", "grad_norm", "expected"),
    [
        (math.nan, 1.0, ("non_finite", "nan", None)),
        (2.0, math.inf, ("non_finite", "inf", None)),
        (2.0, 11.0, ("exploding", "11.0", 10.0)),
        (2.0, 1e-9, ("vanishing", "1e-09", 1e-7)),
    ],
)
def test_what_the_guard_finds_becomes_an_alert_with_its_number(
    loss: float, grad_norm: float, expected: tuple[str, str, float | None]
) -> None:
    config = GuardConfig()
    verdict = Guard(config).judge(7, loss, grad_norm)
    alert = guard_alert(verdict, 7, loss, grad_norm, config)
    assert (alert.rule, str(alert.value), alert.threshold) == expected
    assert (alert.step, alert.message, alert.action) == (7, verdict.message, verdict.action)
    assert alert.severity == "warning"


def test_a_stop_of_the_guard_is_critical() -> None:
    config = GuardConfig(spike="stop")
    guard = Guard(config)
    for step in range(1, 30):
        guard.judge(step, 2.0 + 0.01 * (step % 3), 1.0)
    alert = guard_alert(guard.judge(30, 9.0, 1.0), 30, 9.0, 1.0, config)
    assert (alert.rule, alert.severity, alert.action, alert.value) == ("spike", "critical", "stop", 9.0)


def test_every_rule_beside_the_guard_s_can_be_switched_off_and_has_a_name() -> None:
    own = {rule.setting or name for name, rule in RULES.items() if rule.text and not rule.of_guard}
    assert own == {name for name, value in AlertsConfig().model_dump().items() if value in get_args(get_args(AlertAction)[0])}


def test_ten_thousand_clean_steps_with_noise_raise_no_alert() -> None:
    """Rates with 5 % of noise, 1 step of 200 three times slower, short waits for data, a warm-up, memory and heat that breathe."""
    generator = np.random.default_rng(7)
    watch, guard = rules(), Guard(GuardConfig())
    steps = 10_000
    rates = 50_000 * np.exp(0.05 * generator.standard_normal(steps))
    rates[:5] = 2_000
    rates[generator.random(steps) < 0.005] /= 3
    waits = np.minimum(0.9, 0.02 * generator.exponential(1.0, steps) + 0.5 * (generator.random(steps) < 0.01))
    assert paced(watch, rates.tolist(), waits.tolist()) == []
    memory = 4000 + np.cumsum(generator.normal(0, 1, steps // 10)) + 30 * generator.standard_normal(steps // 10)
    series = [
        HardwareReading(
            (
                replace(
                    GPU, temperature_c=70 + 5 * heat, throttle=("power_cap",) if heat > 0.5 else (), ecc_corrected=int(number // 50)
                ),
            ),
            replace(HOST, private_mib=float(taken), disk_free_gb=100 - number / 100),
        )
        for number, (taken, heat) in enumerate(zip(memory, generator.random(steps // 10), strict=True))
    ]
    assert readings(watch, series) == []
    losses = 2 + 6 * np.exp(-np.arange(steps) / 1500) + 0.05 * generator.standard_normal(steps)
    norms = np.exp(0.3 * generator.standard_normal(steps))
    assert not any(guard.judge(step, loss, norm).rule for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1))


def test_scripted_troubles_are_told_each_once_at_the_right_step() -> None:
    generator = np.random.default_rng(3)
    rates = 1000 * np.exp(0.03 * generator.standard_normal(2000))
    waits = np.full(2000, 0.01)
    rates[800:1000] *= 0.5
    waits[1500:1700] = 0.6
    found = paced(rules(), rates.tolist(), waits.tolist())
    assert [rule for rule, _ in found] == ["throughput", "loader_wait"]
    (_, slow), (_, waiting) = found
    assert 953 <= slow <= 958
    assert 1515 <= waiting <= 1519


def alerts_with(found: Iterable[Sequence[AlertEvent]]) -> set[str]:
    return {alert.rule for alerts in found for alert in alerts}


def test_the_limits_of_speed_and_waiting_are_those_that_are_set() -> None:
    slower = [1000.0] * 100 + [600.0] * 200
    assert [alerts_with(speeds(AlertRules(AlertsConfig(throughput_drop=drop)), slower)) for drop in (0.3, 0.5)] == [
        {"throughput"},
        set(),
    ]
    waiting = [0.4] * 60
    shares = [AlertRules(AlertsConfig(loader_wait_share=share)) for share in (0.3, 0.5)]
    assert [alerts_with(speeds(watch, [1000.0] * 60, waiting)) for watch in shares] == [{"loader_wait"}, set()]


def speeds(watch: AlertRules, rates: Sequence[float], waits: Sequence[float] | None = None) -> list[list[AlertEvent]]:
    waits = waits or [0.0] * len(rates)
    return [
        watch.after_step(step_metrics(step, seconds=1000 / rate, loader_wait_s=wait * 1000 / rate, tokens_per_s=rate))
        for step, (rate, wait) in enumerate(zip(rates, waits, strict=True), 1)
    ]


def test_the_limits_of_memory_and_of_gpus_are_those_that_are_set() -> None:
    leaking = [with_host(private_mib=1000.0 + 5 * number) for number in range(80)]
    assert [readings(AlertRules(AlertsConfig(host_memory_mb=limit)), leaking) != [] for limit in (500, 530)] == [True, False]
    assert readings(AlertRules(AlertsConfig(host_memory="off")), leaking) == []
    corrected = [with_gpu(ecc_corrected=count) for count in (0, 30, 60)]
    assert [len(readings(AlertRules(AlertsConfig(corrected_errors=few)), corrected)) for few in (25, 50, 70)] == [2, 1, 0]
    idle = busy([0.6] * 40)
    shares = [AlertRules(AlertsConfig(gpu_utilisation_share=share)) for share in (0.7, 0.55)]
    assert [readings(watch, idle) != [] for watch in shares] == [True, False]
    hot = [with_gpu(throttle=("hw_thermal",))] * 3
    assert [alert.action for alert in AlertRules(AlertsConfig(throttling="stop")).after_reading(1, hot[0])] == []
    stopping = AlertRules(AlertsConfig(throttling="stop"))
    assert [alert.action for reading in hot for alert in stopping.after_reading(1, reading)] == ["stop"]


@pytest.mark.parametrize(("action", "expected"), [("off", []), ("log", ["log"]), ("stop", ["stop"])])
def test_overfitting_is_treated_as_is_set(action: str, expected: list[str]) -> None:
    found = AlertEvent("overfitting", 500, "warning", "step 500: it rises", "log", 0.02, 0.001)
    watch = AlertRules(AlertsConfig.model_validate({"overfitting": action}))
    assert [alert.action for alert in watch.configured(found)] == expected
