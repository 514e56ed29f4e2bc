"""The rules about speed, memory, disk and hardware of a run, and their alerts.

Nothing here touches a device, a file or a clock. A rule that stays broken raises one alert when it breaks, and the next one only
after it held again. `trainer.health.guard` judges loss and gradient, and `trainer.health.convergence` the evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from trainer.config import AlertAction, AlertsConfig
from trainer.distributed.stragglers import SlowRank
from trainer.health.detectors import LASTING_FALL_S, RECOVERED, Debounce, IdleShare, MemoryTrend, SpeedDrop, WaitShare
from trainer.machine.gpus import GpuReading
from trainer.machine.sampler import HardwareReading
from trainer.runs.events import AlertEvent
from trainer.runs.rules import RULES

_HARMFUL = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
"""Throttle reasons that are a fault of cooling or power supply. A GPU at its power cap works as designed."""
_THROTTLED_READINGS, _COOL_READINGS = 2, 3
_GPU_WARM_UP_READINGS = 30  # the caching allocator takes more memory during the first minutes, because it sees new shapes


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

    def after_step(self, step: int, *, seconds: float | None, waited_s: float, tokens_per_s: float) -> list[AlertEvent]:
        """Return the alerts about the speed of a step; steps come in order. `seconds` is None if its duration is not known."""
        config, alerts = self._config, list[AlertEvent]()
        share = None if seconds is None else self._wait.observe(seconds, waited_s)
        if share is not None:
            alerts += self._alert("loader_wait", step, share, config.loader_wait_share)
        slower = self._speed.observe(tokens_per_s, seconds or 0.0)
        if slower is not None:
            now, usual = slower
            limit = usual * (1 - config.throughput_drop)
            alerts += self._alert("throughput", step, now, limit, usual=usual, fall=1 - now / usual, minutes=LASTING_FALL_S / 60)
        return alerts

    def after_reading(self, step: int, reading: HardwareReading) -> list[AlertEvent]:
        found = [*self._host(step, reading), *self._utilisation(step, reading)]
        for gpu in reading.gpus:
            found += self._gpu(step, gpu)
        return found

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

    def _host(self, step: int, reading: HardwareReading) -> Iterator[AlertEvent]:
        config, host = self._config, reading.host
        growth = self._memory.observe(step, host.private_mib)
        if growth is not None:
            yield from self._alert("host_memory", step, growth, config.host_memory_mb, left=_mb(host.available_mib))
        limit = config.disk_free_gb / (RECOVERED if self._disk.is_bad else 1)
        if self._disk.begins(bad=host.disk_free_gb < limit):
            yield from self._alert("disk", step, host.disk_free_gb, config.disk_free_gb)
        if reading.xids:
            numbers = ", ".join(str(number) for number in sorted(set(reading.xids)))
            yield from self._alert("xid", step, float(reading.xids[-1]), numbers=numbers)

    def _utilisation(self, step: int, reading: HardwareReading) -> Iterator[AlertEvent]:
        busy = [gpu.utilisation for gpu in reading.gpus if gpu.utilisation is not None]
        idle = self._idle.observe(step, reading.taken_s, 1 - fmean(busy)) if busy and reading.taken_s is not None else None
        if idle is not None:
            limit = self._config.gpu_utilisation_share
            yield from self._alert("gpu_utilisation", step, 1 - idle, limit, waited=self._wait.share)

    def _gpu(self, step: int, gpu: GpuReading) -> Iterator[AlertEvent]:
        name = f"GPU {gpu.index} ({gpu.name})"
        if self._lost.setdefault(gpu.index, Debounce()).begins(bad=not gpu.answers):
            yield from self._alert("gpu_lost", step, gpu=name)
        harmful = sorted(_HARMFUL & set(gpu.throttle or ()))
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
