"""Conditions under which settings have an effect, declared beside the settings, and the settings that have none.

A condition is a line of text, with the alternatives `or` and these forms:

    language.keep                  the setting is set: it is not none, false, 0 or empty
    not tokenizer.path             it is not set
    schedule.kind = wsd            it has this value
    watchdog.enabled != off        it has another value
    heuristics.presets has c4      it is a list with this entry

A name is that of a setting, or of a fact that is known only when the command runs. Such a fact also replaces a setting: `device`
is `auto` in the settings, and the found device among the facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from common.settings.model import all_settings, set_names
from common.text import value_text

__all__ = ["OnlyIf", "conditions_of", "names_in", "needed_text", "unmet_conditions", "with_conditions"]


@dataclass(frozen=True)
class OnlyIf:
    """Metadata in the `Annotated` type of a setting: it has an effect only if the condition holds. Several must hold together."""

    condition: str
    words: str = ""
    """The condition in words, if its own text is not plain enough."""

    @property
    def text(self) -> str:
        """What the setting needs, such as `schedule.kind = wsd` or `language.keep to be set`."""
        return self.words or " or ".join(map(_in_words, self.condition.split(" or ")))

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Return whether the condition holds for these values by name. A name without a value is not judged."""
        return any(_holds(part, values) for part in self.condition.split(" or "))


def conditions_of(field: FieldInfo) -> list[OnlyIf]:
    """Return the conditions under which a setting has an effect; empty if it always has one."""
    return [item for item in field.metadata if isinstance(item, OnlyIf)]


def with_conditions(model: type[BaseModel]) -> dict[str, list[OnlyIf]]:
    return {name: found for name, field in all_settings(model) if (found := conditions_of(field))}


def names_in(condition: OnlyIf) -> list[str]:
    return [_parsed(part)[0] for part in condition.condition.split(" or ")]


def unmet_conditions(config: BaseModel, facts: Mapping[str, Any] | None = None) -> dict[str, list[OnlyIf]]:
    """Return the settings that a person has set and that have no effect, each with the conditions that do not hold.

    Settings with the value of their default are left out.

    Args:
        config: the settings.
        facts: what is known besides the settings, by name.
    """
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
    """Return the warning about a setting without effect."""
    return f"{name} has no effect: it needs {' and '.join(condition.text for condition in unmet)}"


def _values(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(config).model_fields:
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _parsed(part: str) -> tuple[str, str, str]:
    """Return name, relation and wanted word of a part of a condition; the relation is `set` or `not` without a word."""
    for relation in ("!=", "=", "has"):
        name, found, wanted = part.partition(f" {relation} ")
        if found:
            return name, relation, wanted
    return (part.removeprefix("not "), "not", "") if part.startswith("not ") else (part, "set", "")


def _holds(part: str, values: Mapping[str, Any]) -> bool:
    name, relation, wanted = _parsed(part)
    if name not in values:
        return True
    value = values[name]
    match relation:
        case "=":
            return value_text(value) == wanted
        case "!=":
            return value_text(value) != wanted
        case "has":
            return wanted in map(value_text, value)
        case "not":
            return not value
        case _:
            return bool(value)


def _in_words(part: str) -> str:
    name, relation, wanted = _parsed(part)
    words = {"set": f"{name} to be set", "not": f"{name} not to be set", "has": f"{wanted} among {name}"}
    return words.get(relation, part)
