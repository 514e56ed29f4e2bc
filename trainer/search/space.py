"""The space of a search: which settings of `train` the trials vary, and between which values."""

from __future__ import annotations

import itertools
import math
import random
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from common.errors import ConfigError
from common.files import UnusableFileError, read_input
from common.settings.dotted import parse_toml
from common.settings.load import MAX_SETTINGS_BYTES, warn_of_former_name
from common.settings.markers import NotSearched
from common.settings.messages import suggest
from common.settings.model import current_names, fields_of, is_among, is_list, markers_of, none_word, setting_names, user_tables
from trainer.config import TrainConfig

Value = bool | int | float | str | None
_KEYS = ("low", "high", "log", "step", "choices")
_MOST_CHOICES, _MOST_COMBINATIONS = 1000, 100_000


def shown(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Choices:
    values: tuple[Value, ...]

    def contains(self, value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in self.values)

    def __str__(self) -> str:
        return ", ".join(map(shown, self.values))

    def grid(self) -> tuple[Value, ...]:
        return self.values

    @property
    def size(self) -> int | None:
        return len(self.values)


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    log: bool = False
    step: float | None = None  # distance of neighbours from `low`; None: any value. Integers without `log` have one.
    whole: bool = False

    def contains(self, value: object) -> bool:
        if type(value) is not (int if self.whole else float) or not isinstance(value, int | float):
            return False
        if not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return abs(steps - round(steps)) < 1e-6  # a tolerance for rounding

    def __str__(self) -> str:
        step = "" if self.step is None else f" in steps of {shown(self.step)}"
        return f"{shown(self.low)} to {shown(self.high)}{', logarithmic' if self.log else ''}{step}"

    def grid(self) -> tuple[Value, ...]:
        numbers = range(self.size or 0)
        if self.whole:
            return tuple(int(self.low) + number * int(self.step or 1) for number in numbers)
        return tuple(min(self.high, self.low + number * (self.step or 0.0)) for number in numbers)  # rounding may exceed it

    @property
    def size(self) -> int | None:
        """Number of values; None: infinitely many."""
        step = self.step or (1 if self.whole else None)
        return None if step is None else math.floor((self.high - self.low) / step + 1e-9) + 1


Dimension = Choices | Range


@dataclass(frozen=True)
class Space:
    dimensions: Mapping[str, Dimension]  # by the dotted names of the settings, sorted

    @property
    def size(self) -> int | None:
        """Number of combinations; None: infinitely many."""
        sizes = [dimension.size for dimension in self.dimensions.values()]
        return math.prod(size for size in sizes if size is not None) if None not in sizes else None

    def combinations(self, seed: int) -> list[dict[str, Value]]:
        """Return all combinations, in an order that depends on the seed. ConfigError: they are too many, or infinitely many."""
        for name, dimension in self.dimensions.items():
            if dimension.size is None:
                remedy = "choices" if isinstance(dimension, Range) and dimension.log else "step, or choices"
                raise ConfigError(f"--space: {name} has no step, so --sampler grid cannot list its values; give {remedy}")
        if self.size is None or self.size > _MOST_COMBINATIONS:
            raise ConfigError(
                f"--space: it has {self.size:,} combinations, but a grid holds {_MOST_COMBINATIONS:,} trials at most; use larger "
                "steps"
            )
        grids = {name: dimension.grid() for name, dimension in self.dimensions.items()}
        found = [dict(zip(grids, values, strict=True)) for values in itertools.product(*grids.values())]
        random.Random(seed).shuffle(found)
        return found

    def contains(self, values: Mapping[str, object]) -> bool:
        return values.keys() == self.dimensions.keys() and all(one.contains(values[name]) for name, one in self.dimensions.items())

    def to_json(self) -> dict[str, Any]:
        return {
            name: {"choices": list(one.values)}
            if isinstance(one, Choices)
            # as the file has it: without the values that have no effect, and without a 0
            else {key: value for key in _KEYS[:4] if (value := getattr(one, key)) not in (None, False)}
            for name, one in self.dimensions.items()
        }


def read_space(path: Path) -> Space:
    try:
        tables = parse_toml(read_input(path, MAX_SETTINGS_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"--space {path}: no such file; docs/search.md shows the format") from None
    except UnusableFileError as error:
        raise ConfigError(f"--space {error}; name a .toml file") from None
    except ValueError as error:
        raise ConfigError(f"--space {path}: not valid TOML: {error}") from None
    known, names = setting_names(TrainConfig), current_names(TrainConfig)
    found: dict[str, Dimension] = {}
    for written, entry in _entries(path, tables, known):
        if (name := names.get(written, written)) != written:
            warn_of_former_name(written, name)
        if name in found:
            raise ConfigError(f"--space {path}: {name} is there by two names; leave out its former one")
        found[name] = _dimension(path, name, entry, _field(path, name, known))
    if not found:
        raise ConfigError(
            f"--space {path}: it names no setting; write for example optim.lr = {{low = 1e-4, high = 1e-2, log = true}}"
        )
    return Space(dict(sorted(found.items())))


def _entries(
    path: Path, values: Mapping[str, Any], known: Mapping[str, FieldInfo], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of the file by their dotted names. A table that is no entry is a section."""
    for name, value in values.items():
        dotted = prefix + name
        if not isinstance(value, dict):
            raise ConfigError(
                f"--space {path}: {dotted} = {value!r} must be a table: {{choices = [..]}}, or {{low = .., high = ..}}"
            )
        if dotted in known or not value or any(key in value for key in _KEYS):
            yield dotted, value
        else:
            yield from _entries(path, value, known, f"{dotted}.")


def _field(path: Path, name: str, known: Mapping[str, FieldInfo]) -> FieldInfo:
    for fixed, marker in markers_of(TrainConfig, NotSearched).items():
        if is_among(name, (fixed,)):
            raise ConfigError(f"--space {path}: a search cannot vary {name}: {marker.reason}; set it in the recipe")
    if name in known:
        field = known[name]
        if is_list(field):
            raise ConfigError(f"--space {path}: a search cannot vary {name}, because its value is a list; set it in the recipe")
        return field
    table, _, entry = name.rpartition(".")
    if entry and table in user_tables(TrainConfig):
        return FieldInfo.from_annotation(typing.get_args(dict(fields_of(TrainConfig))[table].annotation)[1])
    raise ConfigError(
        f"--space {path}: {name} is not a setting of `train`{suggest(name, {one: one for one in known}, TrainConfig)}"
    )


def _dimension(path: Path, name: str, entry: Mapping[str, Any], field: FieldInfo) -> Dimension:
    place = f"--space {path}: {name}"
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(
                f"{place}: {key} is not a key of an entry{suggest(key, {one: one for one in _KEYS})}; use {', '.join(_KEYS)}"
            )
    if "choices" in entry:
        if len(entry) > 1:
            raise ConfigError(
                f"{place}: choices cannot be combined with {', '.join(key for key in entry if key != 'choices')}; leave one out"
            )
        values = entry["choices"]
        if not isinstance(values, list) or not 1 <= len(values) <= _MOST_CHOICES:
            raise ConfigError(f"{place}: choices must be a list of 1 to {_MOST_CHOICES} values")
        found = tuple(_checked(place, none_word(field, value), field) for value in values)
        for number, value in enumerate(found):
            if Choices(found[:number]).contains(value):
                raise ConfigError(f"{place}: choices has {value!r} twice; name each value once")
        return Choices(found)
    if missing := [key for key in ("low", "high") if key not in entry]:
        raise ConfigError(f"{place}: {' and '.join(missing)} missing; give low and high, or choices")
    return _range(place, entry, field)


def _range(place: str, entry: Mapping[str, Any], field: FieldInfo) -> Range:
    kind = _number_kind(field.annotation)
    if kind is None:
        raise ConfigError(f"{place}: the setting is not a number, so it has no low and high; give choices")
    numbers = {key: entry[key] for key in ("low", "high", "step") if key in entry}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or (kind is int and not isinstance(value, int)):
            raise ConfigError(f"{place}: {key} = {value!r} must be {'an integer' if kind is int else 'a number'}")
    low, high = (_checked(place, kind(numbers[key]), field) for key in ("low", "high"))
    step, log = numbers.get("step"), entry.get("log", False)
    assert isinstance(low, int | float)
    assert isinstance(high, int | float)
    if not low < high:
        raise ConfigError(f"{place}: low = {low} must be below high = {high}")
    if not isinstance(log, bool):
        raise ConfigError(f"{place}: log = {log!r} must be true or false")
    if log and step is not None:
        raise ConfigError(f"{place}: it has a step, and a logarithmic range has none")
    if log and low <= 0:
        raise ConfigError(f"{place}: it has low = {low}, but a logarithmic range needs low above 0")
    if step is not None and not 0 < step <= high - low:
        raise ConfigError(f"{place}: step = {step} must be above 0 and at most high - low = {high - low}")
    if step is not None and not math.isclose((high - low) / step, round((high - low) / step), rel_tol=1e-9):
        raise ConfigError(f"{place}: high = {high} is not low plus a multiple of step = {step}; change one of them")
    return Range(low, high, log, kind(step) if step is not None else 1 if kind is int and not log else None, kind is int)


def _checked(place: str, value: Any, field: FieldInfo) -> Value:
    try:
        found = TypeAdapter(field.rebuild_annotation()).validate_python(value)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{place}: the value {value!r} is not allowed: {message[:1].lower()}{message[1:]}") from None
    if isinstance(found, Path):
        return str(found)
    if not isinstance(found, bool | int | float | str | None):
        raise ConfigError(f"{place}: {value!r} is not a number, a text, true or false; set it in the recipe")
    return found


def _number_kind(annotation: Any) -> type[int] | type[float] | None:
    """Return the type of the numbers that a setting takes; None if it takes none."""
    if annotation in (int, float):
        return annotation  # type: ignore[no-any-return]
    if typing.get_origin(annotation) in (Annotated, types.UnionType, typing.Union):
        return next((kind for one in typing.get_args(annotation) if (kind := _number_kind(one))), None)
    return None
