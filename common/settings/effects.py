"""The settings that have no effect, by the conditions in their types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.settings.conditions import OnlyIf
from common.settings.model import all_settings, set_names

__all__ = ["conditions_of", "needed_text", "unmet_conditions"]


def conditions_of(field: FieldInfo) -> list[OnlyIf]:
    return [item for item in field.metadata if isinstance(item, OnlyIf)]


def unmet_conditions(config: BaseModel, facts: Mapping[str, Any] | None = None) -> dict[str, list[OnlyIf]]:
    """Return the settings that a person has set to other values than the default and that have no effect, with the reasons."""
    values = dict(_values(config)) | dict(facts or {})
    given = set(set_names(config))
    return {
        name: unmet
        for name, field in all_settings(type(config))
        if name in given
        and values[name] != field.get_default(call_default_factory=True)
        and (unmet := [condition for condition in conditions_of(field) if not condition.holds(values)])
    }


def needed_text(name: str, unmet: list[OnlyIf]) -> str:
    return f"{name} has no effect: it needs {' and '.join(condition.text for condition in unmet)}"


def _values(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
