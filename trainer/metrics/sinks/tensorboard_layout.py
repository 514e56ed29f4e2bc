"""The arrangement of the curves in TensorBoard, and the settings by which runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from common.settings.dotted import flatten
from common.settings.markers import Effect, Marker
from common.settings.model import is_among, settings_with
from trainer.config import TrainConfig
from trainer.machine.gpus import GpuReading
from trainer.machine.host import HostReading
from trainer.runs.events import EVENTS, GROWTH
from trainer.runs.metric import metrics_of, title_of

__all__ = ["hyper_parameters", "layout"]

_CATEGORIES = ("Loss", "Optimisation", "Speed", "Hardware", "Health")
_NO_NUMBERS = ("index", "name", "throttle")
_DEVICES = {
    "GPU": [field.name for field in fields(GpuReading) if field.name not in _NO_NUMBERS] + ["throttled", GROWTH],
    "host": [field.name for field in fields(HostReading)] + [GROWTH],
}
"""The numbers of each kind of device."""


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the categories of the custom scalars tab, with the charts that the metrics name; tags are regular expressions."""
    tags: dict[str, dict[str, list[str]]] = {category: {} for category in _CATEGORIES}
    for kind in EVENTS.values():
        for metric in metrics_of(kind).values():
            if metric.chart:
                category, _, title = metric.chart.partition(": ")
                tag = metric.curve.replace("{}", ".*") if "{}" in metric.curve else f"{metric.curve}$"
                tags[category].setdefault(title, []).append(tag)
    for device, names in _DEVICES.items():
        for name in names:
            title, unit = title_of(name)
            tags["Hardware"][f"{device}: {title}, {unit}"] = [f"{'gpu_.*' if device == 'GPU' else device}/{name}$"]
    return {category: {title: ["Multiline", found] for title, found in charts.items()} for category, charts in tags.items()}


def hyper_parameters(settings: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings that affect the result, flat, as numbers and texts."""
    left_out = settings_with(TrainConfig, Effect.NONE, Marker.FOLDER)
    flat: dict[str, str | float] = {}
    for name, value in flatten(settings).items():
        if not is_among(name, left_out):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            flat[name] = value if is_number else "none" if value is None else str(value)
    return flat
