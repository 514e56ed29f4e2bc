"""The rules about speed, memory, disk and hardware of a run, and their alerts.

Nothing here touches a device, a file or a clock. A rule that stays broken raises one alert when it breaks, and the next one only
after it held again. `trainer.health.guard` judges loss and gradient, and `trainer.health.convergence` the evaluations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean, median

from common.hardware import HARMFUL_REASONS
from trainer.config import AlertAction, AlertsConfig
from trainer.distributed.stragglers import SlowRank
from trainer.health.convergence import trend
from trainer.machine.sampler import GpuReading, HardwareReading
from trainer.runs.events import AlertEvent, TrainEvent
from trainer.runs.rules import RULES

_RECENT_RATES = 10
_REFERENCE_RATES = 200
LASTING_FALL_S = 300.0  # seconds that the speed must be low before it is an alert
RECOVERED = 0.8  # share of a limit below which a state counts as good again; between that and the limit the state does not change
_WARM_UP_READINGS, _MEMORY_READINGS, _LEAST_MEMORY_READINGS = 6, 60, 30
_START_STEPS, _LEAST_IDLE_READINGS = 3, 5
_LEAST_SCORE = 6.0
_LEAST_GROWTH_MIB = 64.0
_THROTTLED_READINGS, _COOL_READINGS = 2, 3
_GPU_WARM_UP_READINGS = 30  # the caching allocator takes more memory during the first minutes, because it sees new shapes


class Debounce:
    """Reports a state once, when it has turned bad.

    It turns bad after `onset` bad moments in a row, and good again after `recovery` good ones.
    """

    def __init__(self, onset: int = 1, recovery: int = 1) -> None:
        self._onset, self._recovery = onset, recovery
        self._bad = self._good = 0
        self.is_bad = False

    def rises(self, value: float, limit: float) -> bool:
        """Take the next moment, bad if a value is above a limit. It is good again below 0.8 of the limit."""
        return self.begins(bad=value > limit * (RECOVERED if self.is_bad else 1))

    def begins(self, *, bad: bool) -> bool:
        """Take the next moment. Returns True at the moment from which the state counts as bad."""
        self._bad, self._good = (self._bad + 1, 0) if bad else (0, self._good + 1)
        if self.is_bad:
            self.is_bad = self._good < self._recovery
            return False
        self.is_bad = self._bad >= self._onset
        return self.is_bad


class WaitShare:
    """The share of the time that the last `window` steps waited for data: bad above `limit`, good again below 0.8 of it."""

    def __init__(self, window: int, limit: float) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._limit = limit
        self._state = Debounce()

    def observe(self, seconds: float, waited_s: float) -> float | None:
        """Take the duration of a step and its wait. Returns the share if it turns bad with this step, else None."""
        self._steps.append((seconds, waited_s))
        if len(self._steps) < (self._steps.maxlen or 0):
            return None
        return self.share if self._state.rises(self.share, self._limit) else None

    @property
    def share(self) -> float:
        return sum(waited for _, waited in self._steps) / max(1e-9, sum(duration for duration, _ in self._steps))


class IdleShare:
    """The mean share of the last `window_s` seconds in which GPUs were idle: bad above `limit`, good again below 0.8 of it.

    The first steps after a start or a resume are left out, because a run compiles its model and fills its caches in them.
    """

    def __init__(self, window_s: float, limit: float) -> None:
        self._window_s, self._limit = window_s, limit
        self._first_step: int | None = None
        self._since: float | None = None
        self._readings: deque[tuple[float, float]] = deque()
        self._state = Debounce()

    def observe(self, step: int, taken_s: float, idle: float) -> float | None:
        self._first_step = step if self._first_step is None else self._first_step
        if step < self._first_step + _START_STEPS:
            return None
        self._since = taken_s if self._since is None else self._since
        self._readings.append((taken_s, idle))
        while self._readings[0][0] <= taken_s - self._window_s:
            self._readings.popleft()
        if taken_s - self._since < self._window_s or len(self._readings) < _LEAST_IDLE_READINGS:
            return None
        mean = fmean(idle for _, idle in self._readings)
        return mean if self._state.rises(mean, self._limit) else None


class SpeedDrop:
    """Falls of the speed that last: compares the median of the last 10 steps with that of up to 200 steps before them.

    Other programs slow a run down for seconds at a time, and that is no fault. So a fall by the share `drop` counts once it has
    lasted for `least_s` seconds of steps without a pause. `window` is the number of steps in the reference before it is used. The
    reference does not change while the speed is low, so a run that stays slow is reported once.
    """

    def __init__(self, window: int, drop: float, least_s: float = LASTING_FALL_S) -> None:
        self._window, self._drop, self._least_s = window, drop, least_s
        self._recent: deque[float] = deque(maxlen=_RECENT_RATES)
        self._reference: deque[float] = deque(maxlen=max(window, _REFERENCE_RATES))
        self._state = Debounce()
        self._fallen_s: float | None = None  # how long the speed has been low; None if it is not

    def observe(self, rate: float, seconds: float) -> tuple[float, float] | None:
        """Take the rate and the duration of a step. Returns the present and the usual rate if a lasting fall is found with it."""
        if len(self._recent) == _RECENT_RATES and self._fallen_s is None:
            self._reference.append(self._recent[0])
        self._recent.append(rate)
        if len(self._reference) < self._window:
            return None
        now, usual = median(self._recent), median(self._reference)
        fallen = now < usual * (1 - self._drop * (RECOVERED if self._state.is_bad else 1))
        self._fallen_s = (self._fallen_s or 0.0) + seconds if fallen else None
        lasts = self._fallen_s is not None and self._fallen_s >= self._least_s
        return (now, usual) if self._state.begins(bad=lasts) else None


class MemoryTrend:
    """Growth of the memory of a run on the host or of a GPU, from the trend of its last 60 readings.

    It counts as a leak if it is faster than `limit_mb` (10^6 bytes) per 1,000 steps, if most pairs of readings rise (a score of 6
    standard deviations, which noise without a trend reaches once in 10^9), and if it amounts to 64 MiB. The first
    `warm_up_readings` are left out, because a run takes memory when it begins.
    """

    def __init__(self, limit_mb: float, warm_up_readings: int = _WARM_UP_READINGS) -> None:
        self._limit = limit_mb
        self._warm_up_readings = warm_up_readings
        self._seen = 0
        self._readings: deque[tuple[float, float]] = deque(maxlen=_MEMORY_READINGS)
        self._state = Debounce(recovery=_WARM_UP_READINGS)
        self.mb_per_1000_steps: float | None = None  # the growth; None while there are too few readings

    def observe(self, step: int, used_mib: float) -> float | None:
        """Take a reading in MiB. Returns the growth in MB per 1,000 steps if a leak begins with it, else None."""
        self._seen += 1
        if self._seen <= self._warm_up_readings:
            return None
        if self._readings and step < self._readings[-1][0]:  # after a rollback, pairs across it would have a negative slope
            self._readings.clear()
            self.mb_per_1000_steps = None
        self._readings.append((step, used_mib))
        if len(self._readings) < _LEAST_MEMORY_READINGS:
            return None
        steps, mib = zip(*self._readings, strict=True)
        found = trend(steps, mib)
        self.mb_per_1000_steps = found.slope * 1000 * 2**20 / 1e6
        leaks = (
            self.mb_per_1000_steps > self._limit
            and found.score > _LEAST_SCORE
            and found.slope * (steps[-1] - steps[0]) > _LEAST_GROWTH_MIB
        )
        return self.mb_per_1000_steps if self._state.begins(bad=leaks) else None


class AlertRules:
    def __init__(self, config: AlertsConfig) -> None:
        self._config = config
        self._wait = WaitShare(config.window_steps, config.loader_wait_share)
        self._speed = SpeedDrop(config.window_steps, config.throughput_drop)
        self._memory = MemoryTrend(config.host_memory_mb)
        self._idle = IdleShare(60 * config.gpu_utilisation_minutes, 1 - config.gpu_utilisation_share)
        self._gpu_memory: dict[int, MemoryTrend] = {}
        self._disk = Debounce()
        self._throttled: dict[int, Debounce] = {}
        self._lost: dict[int, Debounce] = {}
        self._corrected: dict[int, int] = {}
        self._uncorrected: dict[int, int] = {}

    @property
    def memory_trend(self) -> float | None:
        # in MB per 1,000 steps
        return self._memory.mb_per_1000_steps

    @property
    def gpu_memory_trends(self) -> dict[int, float]:
        trends = {index: trend.mb_per_1000_steps for index, trend in self._gpu_memory.items()}
        return {index: growth for index, growth in trends.items() if growth is not None}

    def after_step(self, event: TrainEvent) -> list[AlertEvent]:
        """Return the alerts about the numbers of a step. Steps come in order."""
        config, alerts, step, seconds = self._config, list[AlertEvent](), event.step, event.seconds
        share = None if seconds is None else self._wait.observe(seconds, event.loader_wait_s or 0.0)
        if share is not None:
            alerts += self._alert("loader_wait", step, share, config.loader_wait_share)
        slower = None if event.tokens_per_s is None else self._speed.observe(event.tokens_per_s, seconds or 0.0)
        if slower is not None:
            now, usual = slower
            limit = usual * (1 - config.throughput_drop)
            alerts += self._alert("throughput", step, now, limit, usual=usual, fall=1 - now / usual, minutes=LASTING_FALL_S / 60)
        return alerts

    def after_reading(self, step: int, reading: HardwareReading) -> list[AlertEvent]:
        config, host, alerts = self._config, reading.host, list[AlertEvent]()
        growth = self._memory.observe(step, host.private_mib)
        if growth is not None:
            alerts += self._alert("host_memory", step, growth, config.host_memory_mb, left=_mb(host.available_mib))
        limit = config.disk_free_gb / (RECOVERED if self._disk.is_bad else 1)
        if self._disk.begins(bad=host.disk_free_gb < limit):
            alerts += self._alert("disk", step, host.disk_free_gb, config.disk_free_gb)
        if reading.xids:
            numbers = ", ".join(str(number) for number in sorted(set(reading.xids)))
            alerts += self._alert("xid", step, float(reading.xids[-1]), numbers=numbers)
        busy = [gpu.utilisation for gpu in reading.gpus if gpu.utilisation is not None]
        idle = self._idle.observe(step, reading.taken_s, 1 - fmean(busy)) if busy and reading.taken_s is not None else None
        if idle is not None:
            alerts += self._alert("gpu_utilisation", step, 1 - idle, config.gpu_utilisation_share, waited=self._wait.share)
        for gpu in reading.gpus:
            alerts += self._gpu(step, gpu)
        return alerts

    def slow_rank(self, step: int, slow: SlowRank) -> list[AlertEvent]:
        # `trainer.distributed.stragglers` reports each once
        return self._alert("slow_rank", step, slow.factor, found=slow.describe())

    def configured(self, alert: AlertEvent) -> list[AlertEvent]:
        setting = RULES[alert.rule].setting or alert.rule
        action: AlertAction = getattr(self._config, setting)
        if action == "off":
            return []
        if action == "stop":
            message = f"{alert.message}. Training stops, because alerts.{setting} = stop"
            alert = replace(alert, severity="critical", message=message)
        return [replace(alert, action=action)]

    def _gpu(self, step: int, gpu: GpuReading) -> Iterator[AlertEvent]:
        name = f"GPU {gpu.index} ({gpu.name})"
        if self._lost.setdefault(gpu.index, Debounce()).begins(bad=not gpu.answers):
            yield from self._alert("gpu_lost", step, gpu=name)
        harmful = sorted(HARMFUL_REASONS & set(gpu.throttle or ()))
        if self._throttled.setdefault(gpu.index, Debounce(_THROTTLED_READINGS, _COOL_READINGS)).begins(bad=bool(harmful)):
            heat = "" if gpu.temperature_c is None else f" at {gpu.temperature_c:.0f} °C"
            clock = "" if gpu.sm_clock_mhz is None else f", clock {gpu.sm_clock_mhz:.0f} MHz"
            yield from self._alert(
                "throttling", step, gpu.temperature_c, gpu=name, heat=heat, clock=clock, reasons=", ".join(harmful)
            )
        if gpu.memory_used_mib is not None:
            limit = self._config.gpu_memory_mb
            trend = self._gpu_memory.setdefault(gpu.index, MemoryTrend(limit, _GPU_WARM_UP_READINGS))
            growth = trend.observe(step, gpu.memory_used_mib)
            if growth is not None:
                total = "" if gpu.memory_total_mib is None else f" of {_mb(gpu.memory_total_mib)} MB"
                yield from self._alert("gpu_memory", step, growth, limit, gpu=name, used=f"{_mb(gpu.memory_used_mib)} MB{total}")
        if new := _risen(self._uncorrected, gpu.index, gpu.ecc_uncorrected, 1):
            yield from self._alert("ecc", step, float(new), 1.0, gpu=name)
        few = self._config.corrected_errors
        if corrected := _risen(self._corrected, gpu.index, gpu.ecc_corrected, few):
            yield from self._alert("ecc_corrected", step, float(corrected), float(few), gpu=name)

    def _alert(
        self, rule: str, step: int, value: float | None = None, threshold: float | None = None, **facts: object
    ) -> list[AlertEvent]:
        text = RULES[rule].text.format(value=value, threshold=threshold, alerts=self._config, **facts)
        message = f"step {step}: {text}"
        return self.configured(AlertEvent(RULES[rule].name or rule, step, RULES[rule].severity, message, "log", value, threshold))


def _mb(mib: float) -> str:
    return f"{mib * 2**20 / 1e6:,.0f}"


def _risen(known: dict[int, int], index: int, count: int | None, least: int) -> int:
    """Return how far a counter has risen since the last alert, if by `least` or more, else 0. The first count of a GPU gives 0."""
    if count is None:
        return 0
    before = known.setdefault(index, count)
    if count < before:  # the driver was loaded again
        known[index] = count
        return 0
    if count - before < least:
        return 0
    known[index] = count
    return count - before
