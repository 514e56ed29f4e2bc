"""How a field of an event, or a property in `Written.derived`, declares its JSON form, its curve and its places in texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints

from common.files import plain

_UNITS = {
    "_mb_per_1000_steps": "MB per 1,000 steps",
    "_mb_per_s": "MB per second",
    "_mib": "MiB",
    "_gb": "GB",
    "_c": "°C",
    "_w": "W",
    "_mhz": "MHz",
    "": "share, or count",
}
"""Units by the suffix of a name."""


@dataclass(frozen=True)
class Plot:
    """A chart of the report. Its vertical axis may be logarithmic, unless it begins at zero."""

    title: str
    unit: str  # a share has a unit that begins with `%`
    from_zero: bool = False
    averaged: bool = True  # whether the chart of a metric of steps has a moving average
    main: bool = False  # whether the chart is in `training_metrics.png` too


@dataclass(frozen=True)
class Metric:
    curve: str = ""  # Name of its curve in TensorBoard, Weights & Biases and MLflow. `{}` stands for a name in a mapping.
    _: KW_ONLY
    key: str = ""  # its name in the file, if that is not the name of the field
    in_file: bool = True
    null: bool = False  # Whether the file has `null` for an unknown value. Otherwise the file lacks a value that is None or empty.
    digits: int | None = None
    after: str = ""  # for a property: the field that it follows in the file
    exact: bool = False  # whether a replay must reproduce the value bit for bit
    first: str = ""  # a second name of the curve in TensorBoard, which shows names in upper case first
    chart: str = ""  # category and title in TensorBoard's *Custom Scalars*, with a colon between
    compared: bool = False  # whether TensorBoard's *HParams* compares runs by its last value
    terminal: str = ""  # in the line of the event, with the separator before it. `{value}` and `{event}` stand for them.
    bar: str = ""
    plot: Plot | None = None


class Written:
    derived: ClassVar[Mapping[str, Metric]] = {}

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for name, key, digits, null in _form_of(type(self)).written:
            value = getattr(self, name)
            if isinstance(value, float):
                value = plain(value, digits)
            elif value is None or isinstance(value, Mapping | tuple):
                if not value and not null:
                    continue
                value = _plain(value, digits)
            facts[key] = value
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], **others: Any) -> Self:
        return cls(**{name: facts.get(key) for name, key in _form_of(cls).read}, **others)


def metrics_of(kind: type[Written]) -> Mapping[str, Metric]:
    return _form_of(kind).metrics


@dataclass(frozen=True)
class _Form:
    metrics: Mapping[str, Metric]
    written: Sequence[tuple[str, str, int | None, bool]]  # name, key, digits and `null` of all that is in the file
    read: Sequence[tuple[str, str]]  # name and key of the fields that are in the file


_FORMS: dict[type[Written], _Form] = {}


def _form_of(kind: type[Written]) -> _Form:
    if kind in _FORMS:
        return _FORMS[kind]
    hints, metrics = get_type_hints(kind, include_extras=True), dict[str, Metric]()
    own = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # each subclass is a dataclass
    for field in own:
        marks = getattr(hints[field], "__metadata__", ())
        metrics[field] = next((mark for mark in marks if isinstance(mark, Metric)), Metric(null=True))
        metrics |= {name: metric for name, metric in kind.derived.items() if metric.after == field}
    metrics |= kind.derived
    in_file = [(name, metric) for name, metric in metrics.items() if metric.in_file]
    _FORMS[kind] = _Form(
        metrics,
        [(name, metric.key or name, metric.digits, metric.null) for name, metric in in_file],
        [(name, metric.key or name) for name, metric in in_file if name in own],
    )
    return _FORMS[kind]


def title_of(name: str) -> tuple[str, str]:
    """Return a name without its unit, in words, and the unit."""
    suffix = next(suffix for suffix in _UNITS if name.endswith(suffix))
    return name.removesuffix(suffix).replace("_", " "), _UNITS[suffix]


def encodable(text: str) -> str:
    """Return the text with each lone surrogate, which UTF-8 cannot hold, as a backslash and its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(value: Any, digits: int | None) -> Any:
    if isinstance(value, Written):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _plain(part, digits) for name, part in value.items()}
    return [_plain(part, digits) for part in value] if isinstance(value, tuple | list) else plain(value, digits)
