"""Conditions under which settings have an effect, as text beside the settings, with `or` and these forms:

    language.keep                  the setting is set: it is not none, false, 0 or empty
    not tokenizer.path             it is not set
    schedule.kind = wsd            it has this value
    watchdog.enabled != off        it has another value
    heuristics.presets has c4      it is a list with this entry

A name is that of a setting, or of a fact that is known only when the command runs and may replace a setting, such as `device`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.text import value_text


@dataclass(frozen=True)
class OnlyIf:
    """Metadata in the `Annotated` type of a setting: it has an effect only if the condition holds. Several must hold together."""

    condition: str
    words: str = ""  # the condition in words, if its own text is not plain enough

    @property
    def text(self) -> str:
        if self.words:
            return self.words
        texts = []
        for part in self.condition.split(" or "):
            name, relation, wanted = _parsed(part)
            words = {"set": f"{name} to be set", "not": f"{name} not to be set", "has": f"{wanted} among {name}"}
            texts.append(words.get(relation, part))
        return " or ".join(texts)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """A name without a value is not judged."""
        return any(_holds(part, values) for part in self.condition.split(" or "))


def names_in(condition: OnlyIf) -> list[str]:
    return [_parsed(part)[0] for part in condition.condition.split(" or ")]


def _parsed(part: str) -> tuple[str, str, str]:
    """Return name, relation and wanted word; the relation is `set` or `not` without a word."""
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
