"""What a rule about the form of a text declares, and the presets that collect rules.

A rule is a function that measures each text of a batch, under the decorator `Preset.rule`. The settings of `prepare` and the
reasons of rejection are made from these declarations. They import no NumPy, because the help of `prepare` lists the settings: a
measure calls the methods of `TextStatistics`, and the operators and methods of the arrays that these return.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

__all__ = ["Preset", "Rule", "Setting", "Share"]

Share = Annotated[float, Field(ge=0, le=1)]
MeasureT = TypeVar("MeasureT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Setting:
    """A setting in the section `heuristics` of `prepare`."""

    name: str
    type: Any
    default: Any
    help: str
    ge: float | None = None
    le: float | None = None


@dataclass(frozen=True)
class Rule:
    """A bound on a measure of the form of a text."""

    reason: str
    what: str
    """The measure in words, for the detail of a rejection."""
    measure: Callable[[Any], Any]
    """Returns one number for each text of a batch, from its `TextStatistics`."""
    setting: str
    is_least: bool
    """Whether the setting is the lowest allowed value; otherwise it is the highest."""
    place: int | None = None
    """The index of the bound in a setting with several values."""
    applies: Callable[[Any], Any] | None = None
    """Returns the texts that the rule applies to; None: all."""

    def bound(self, settings: Any) -> float:
        value = getattr(settings, self.setting)
        return float(value if self.place is None else value[self.place])

    def threshold(self, settings: Any) -> str:
        place = "" if self.place is None else f"[{self.place}]"
        return f"heuristics.{self.setting}{place} = {self.bound(settings):.9g}"


@dataclass(frozen=True)
class Preset:
    """A set of rules that the user turns on together. They are checked in the order of their definition."""

    name: str
    source: str = ""
    for_code: bool = False
    """Whether the rules apply to code alone. Otherwise they apply to everything else."""
    rules: list[Rule] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)

    def rule(
        self,
        reason: str,
        what: str,
        *more: Setting,
        at_least: Setting | None = None,
        at_most: Setting | None = None,
        sizes: Sequence[int] = (),
        applies: Callable[[Any], Any] | None = None,
    ) -> Callable[[MeasureT], MeasureT]:
        """Declare the decorated function as the measure of a rule.

        Args:
            reason: of the documents that break it.
            what: the measure in words, for the detail of a rejection.
            more: settings that the measure reads from `TextStatistics.settings`.
            at_least: the lowest allowed value.
            at_most: the highest allowed value.
            sizes: makes one rule of each size. The measure and `what` take the size, and a bound has one value for each.
            applies: returns the texts that the rule applies to; None: all.
        """

        def register(measure: MeasureT) -> MeasureT:
            for bound, is_least in ((at_least, True), (at_most, False)):
                if bound is not None:
                    self.settings.append(bound)
                    self.rules.extend(_rules(bound.name, is_least, measure))
            self.settings.extend(more)
            return measure

        def _rules(setting: str, is_least: bool, measure: MeasureT) -> Iterator[Rule]:
            if not sizes:
                yield Rule(reason, what, measure, setting, is_least, applies=applies)
            for place, size in enumerate(sizes):
                yield Rule(reason, what.format(size), partial(measure, size=size), setting, is_least, place, applies)

        return register
