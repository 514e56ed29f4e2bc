"""What a setting is, declared in its type: `min_chars: ShapesData[int] = Field(20, ge=1)`. `settings_with` finds them.

Conditions under which settings have an effect are texts beside the settings, with `or` and these forms:

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
from enum import Enum
from typing import Annotated, Any, TypeVar

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


T = TypeVar("T")


class Effect(Enum):
    SHAPES_DATA = "the prepared bytes; a manifest holds the value"
    SHAPES_DATA_IF_CHANGED = "the prepared bytes; a manifest holds a value other than the default, as older ones lack the setting"
    SHAPES_DATA_BY_CONTENT = "the prepared bytes, by the content of the file; a manifest holds its digest, and no path"
    IDENTITY = "the bits of a run; its identity holds the value"
    RESOLVED_IN_IDENTITY = "the bits of a run; its identity holds what the value leads to: a digest, a kernel, a number"
    NO_BITS = "which steps a run makes or what is measured, and no bit of a step"
    NONE = "no result: where and how the work is done"


ShapesData = Annotated[T, Effect.SHAPES_DATA]
ShapesDataIfChanged = Annotated[T, Effect.SHAPES_DATA_IF_CHANGED]
ShapesDataByContent = Annotated[T, Effect.SHAPES_DATA_BY_CONTENT]
Identity = Annotated[T, Effect.IDENTITY]
ResolvedInIdentity = Annotated[T, Effect.RESOLVED_IN_IDENTITY]
NoEffectOnBits = Annotated[T, Effect.NO_BITS]
NoEffectOnResults = Annotated[T, Effect.NONE]


@dataclass(frozen=True)
class Marker:
    meaning: str


SHARED_BY_SOURCES = Marker("a source cannot override it, because all sources share the model that it configures")
PER_START = Marker("it holds for one start and is not taken from the settings that a run has recorded")
FOLDER = Marker("it names a folder, or a checkpoint in it. Reports of changed settings leave it out")
MOVEABLE = Marker("its content is compared with that of the start before, and not its name")
ASKED_AGAIN = Marker("it runs code or sends data to a service, so the user must give it again and no file of a run decides it")
FITS_WEIGHTS = Marker(
    "weights give the outputs that they were trained for only with the same value, although their shapes fit any value"
)
EXPORTED = Marker("`config.json` of an exported model expresses it")
OF_TRAINING = Marker("it changes the training of a model, and not the outputs of a trained one")
DIVIDES_WORK = Marker("it divides the work of a preparation, and changes only the order of the rows")
NAMES_SETTINGS = Marker("its values are names of settings, and may be those of earlier versions")


@dataclass(frozen=True)
class AlsoCalled:
    """What other tools call the setting, separated by spaces. An error suggests the setting for such a name."""

    names: str


@dataclass(frozen=True)
class Formerly:
    """The dotted name that the setting had in earlier versions. It is accepted with a warning."""

    name: str


@dataclass(frozen=True)
class Frequent:
    """One of the settings that people change most, which the short help shows with this value as an example, in this order. The
    first one of a section is also shown as a line of a recipe, so its value is a number.
    """

    example: str
    order: int


@dataclass(frozen=True)
class InReplay:
    """The value in a replay, which ends at a given step, sends nothing to a service, and needs little memory."""

    value: object = None
    instead_of: object = None
    """The only value that is replaced; None: every value."""
    identity: bool = False
    """Whether the identity of the run has the value."""


@dataclass(frozen=True)
class FixesShapes:
    """It decides about names or shapes of the tensors in checkpoints."""

    resolved: str = ""  # property of its section with the value that it has or stands for; empty: the setting itself


@dataclass(frozen=True)
class NotSearched:
    """A search cannot vary the setting, or the settings of the section."""

    reason: str
