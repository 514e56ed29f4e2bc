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
from trainer.health.alerts import Alert, Rule, Severity
from trainer.health.detectors import LASTING_FALL_S, RECOVERED, Debounce, IdleShare, MemoryTrend, SpeedDrop, WaitShare
from trainer.machine.gpus import GpuReading
from trainer.machine.sampler import HardwareReading

__all__ = ["AlertRules"]

_SETTING: dict[str, str] = {"ecc": "gpu_errors", "xid": "gpu_errors", "gpu_lost": "gpu_errors"}
"""The setting with the action of a rule, if it has another name than the rule."""
_HARMFUL = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
"""Throttle reasons that are a fault of cooling or power supply. A GPU at its power cap works as designed."""
_THROTTLED_READINGS, _COOL_READINGS = 2, 3
_GPU_WARM_UP_READINGS = 30
"""The caching allocator takes more memory during the first minutes, because it sees new shapes."""


class AlertRules:
    """All rules except those of the guard, with their settings."""

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
        """Growth of the run's private memory on the host in MB per 1,000 steps; None while there are too few readings."""
        return self._memory.mb_per_1000_steps

    @property
    def gpu_memory_trends(self) -> dict[int, float]:
        """Growth of the used memory in MB per 1,000 steps by the index of the GPU; without those with too few readings."""
        trends = {index: trend.mb_per_1000_steps for index, trend in self._gpu_memory.items()}
        return {index: growth for index, growth in trends.items() if growth is not None}

    def after_step(self, step: int, *, seconds: float | None, waited_s: float, tokens_per_s: float) -> list[Alert]:
        """Return the alerts about the speed of a step; steps come in order.

        Args:
            step: its number.
            seconds: its duration; None if it is not known.
            waited_s: the part of the duration in which it waited for data.
            tokens_per_s: its speed.
        """
        config, alerts = self._config, list[Alert]()
        share = None if seconds is None else self._wait.observe(seconds, waited_s)
        if share is not None:
            alerts += self._alert(
                "loader_wait",
                step,
                "warning",
                f"step {step}: {share:.0%} of the last {config.window_steps} steps' time was spent waiting for data, above "
                f"alerts.loader_wait_share = {config.loader_wait_share:g}. Raise prefetch, or move the data to a faster disk",
                share,
                config.loader_wait_share,
            )
        slower = self._speed.observe(tokens_per_s, seconds or 0.0)
        if slower is not None:
            now, usual = slower
            alerts += self._alert(
                "throughput",
                step,
                "warning",
                f"step {step}: {now:,.0f} tokens/s, {1 - now / usual:.0%} below the usual {usual:,.0f} for "
                f"{LASTING_FALL_S / 60:.0f} minutes, more than alerts.throughput_drop = {config.throughput_drop:g}. Look at the "
                "hardware curves and at other programs there",
                now,
                usual * (1 - config.throughput_drop),
            )
        return alerts

    def after_reading(self, step: int, reading: HardwareReading) -> list[Alert]:
        """Return the alerts about a reading of the machine; `step` is the last one that was reported."""
        found = [*self._host(step, reading), *self._xids(step, reading), *self._utilisation(step, reading)]
        for gpu in reading.gpus:
            found += self._gpu(step, gpu)
        return found

    def slow_rank(self, step: int, slow: SlowRank) -> list[Alert]:
        """Return the alert for a rank for which the others wait; `trainer.distributed.stragglers` reports each once."""
        return self._alert("slow_rank", step, "warning", f"step {step}: {slow.describe()}", slow.factor)

    def configured(self, alert: Alert) -> list[Alert]:
        """Return the alert with the action of its rule's setting; nothing if the rule is off."""
        setting = _SETTING.get(alert.rule, alert.rule)
        action: AlertAction = getattr(self._config, setting)
        if action == "off":
            return []
        if action == "stop":
            message = f"{alert.message}. Training stops, because alerts.{setting} = stop"
            alert = replace(alert, severity="critical", message=message)
        return [replace(alert, action=action)]

    def _host(self, step: int, reading: HardwareReading) -> Iterator[Alert]:
        config, host = self._config, reading.host
        growth = self._memory.observe(step, host.private_mib)
        if growth is not None:
            yield from self._alert(
                "host_memory",
                step,
                "warning",
                f"step {step}: the run's memory on the host grows by {growth:,.0f} MB per 1,000 steps, more than "
                f"alerts.host_memory_mb = {config.host_memory_mb:g}, and {_mb(host.available_mib)} MB are left. Check "
                "that an extension does not keep its arguments; a restart of the run frees the memory",
                growth,
                config.host_memory_mb,
            )
        limit = config.disk_free_gb / (RECOVERED if self._disk.is_bad else 1)
        if self._disk.begins(bad=host.disk_free_gb < limit):
            yield from self._alert(
                "disk",
                step,
                "critical",
                f"step {step}: {host.disk_free_gb:.1f} GB are free on the disk of the run, fewer than alerts.disk_free_gb = "
                f"{config.disk_free_gb:g}. Checkpoints cannot be written to a full disk. Make room, or lower checkpoint.keep_last",
                host.disk_free_gb,
                config.disk_free_gb,
            )

    def _xids(self, step: int, reading: HardwareReading) -> Iterator[Alert]:
        if reading.xids:
            numbers = ", ".join(str(number) for number in sorted(set(reading.xids)))
            yield from self._alert(
                "xid",
                step,
                "critical",
                f"step {step}: the GPU driver reports Xid {numbers}. Look the number up in NVIDIA's list of Xid errors; if it "
                "comes back, take the GPU out of service",
                float(reading.xids[-1]),
            )

    def _utilisation(self, step: int, reading: HardwareReading) -> Iterator[Alert]:
        config = self._config
        busy = [gpu.utilisation for gpu in reading.gpus if gpu.utilisation is not None]
        idle = self._idle.observe(step, reading.taken_s, 1 - fmean(busy)) if busy and reading.taken_s is not None else None
        if idle is not None:
            yield from self._alert(
                "gpu_utilisation",
                step,
                "warning",
                f"step {step}: the GPUs were busy for {1 - idle:.0%} of the last {config.gpu_utilisation_minutes:g} minutes, "
                f"less than alerts.gpu_utilisation_share = {config.gpu_utilisation_share:g}; the last steps waited for data for "
                f"{self._wait.share:.0%} of their time. If that is much, raise prefetch or use a faster disk; otherwise raise "
                "batch.micro",
                1 - idle,
                config.gpu_utilisation_share,
            )

    def _gpu_growth(self, step: int, gpu: GpuReading, where: str) -> Iterator[Alert]:
        if gpu.memory_used_mib is None:
            return
        limit = self._config.gpu_memory_mb
        trend = self._gpu_memory.setdefault(gpu.index, MemoryTrend(limit, _GPU_WARM_UP_READINGS))
        growth = trend.observe(step, gpu.memory_used_mib)
        if growth is not None:
            total = "" if gpu.memory_total_mib is None else f" of {_mb(gpu.memory_total_mib)} MB"
            yield from self._alert(
                "gpu_memory",
                step,
                "warning",
                f"{where}: its used memory grows by {growth:,.0f} MB per 1,000 steps, more than alerts.gpu_memory_mb = {limit:g}; "
                f"{_mb(gpu.memory_used_mib)} MB{total} are used. Check that an extension does not keep tensors, and "
                "that no other program uses the GPU; a restart of the run frees the memory",
                growth,
                limit,
            )

    def _gpu(self, step: int, gpu: GpuReading) -> Iterator[Alert]:
        where = f"step {step}: GPU {gpu.index} ({gpu.name})"
        if self._lost.setdefault(gpu.index, Debounce()).begins(bad=not gpu.answers):
            yield from self._alert(
                "gpu_lost",
                step,
                "critical",
                f"{where} does not answer the driver. Restart the machine, or take the GPU out of service",
            )
        harmful = sorted(_HARMFUL & set(gpu.throttle or ()))
        if self._throttled.setdefault(gpu.index, Debounce(_THROTTLED_READINGS, _COOL_READINGS)).begins(bad=bool(harmful)):
            heat = "" if gpu.temperature_c is None else f" at {gpu.temperature_c:.0f} °C"
            clock = "" if gpu.sm_clock_mhz is None else f", clock {gpu.sm_clock_mhz:.0f} MHz"
            yield from self._alert(
                "throttling",
                step,
                "warning",
                f"{where} slows itself down{heat}{clock}: {', '.join(harmful)}. Look at its cooling and power supply",
                gpu.temperature_c,
            )
        yield from self._gpu_growth(step, gpu, where)
        yield from self._ecc(step, gpu, where)

    def _ecc(self, step: int, gpu: GpuReading, where: str) -> Iterator[Alert]:
        new = _risen(self._uncorrected, gpu.index, gpu.ecc_uncorrected, 1)
        if new:
            yield from self._alert(
                "ecc",
                step,
                "critical",
                f"{where} has {new} new ECC errors in memory that could not be corrected. Its results since then may be wrong: "
                "go back to an earlier checkpoint, and take the GPU out of service",
                float(new),
                1.0,
            )
        few = self._config.corrected_errors
        corrected = _risen(self._corrected, gpu.index, gpu.ecc_corrected, few)
        if corrected:
            yield from self._alert(
                "ecc",
                step,
                "warning",
                f"{where} has corrected {corrected} ECC errors in memory since they were last counted, at least "
                f"alerts.corrected_errors = {few}. Its memory is wearing out",
                float(corrected),
                float(few),
            )

    def _alert(
        self, rule: Rule, step: int, severity: Severity, message: str, value: float | None = None, threshold: float | None = None
    ) -> list[Alert]:
        return self.configured(Alert(rule, step, severity, message, "log", value, threshold))


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
