"""What a rule about the form of a text declares, and the presets that collect rules.

A rule is a function that measures each text of a batch. Its docstring is the help of its threshold: the settings of `prepare` and
the reasons of rejection are made from these declarations. They import no NumPy, because the help of `prepare` lists the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from pydantic import Field

Share = Annotated[float, Field(ge=0, le=1)]
MeasureT = TypeVar("MeasureT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    reason: str
    what: str  # the measure in words, for the detail of a rejection
    measure: Callable[[Any], Any]  # returns one number for each text of a batch, from its `TextStatistics`
    setting: str
    is_least: bool  # whether the setting is the lowest allowed value; otherwise it is the highest
    place: int | None  # the index of the bound in a setting with several values
    applies: Callable[[Any], Any] | None  # returns which texts the rule applies to; None: all

    def bound(self, settings: Any) -> float:
        value = getattr(settings, self.setting)
        return float(value if self.place is None else value[self.place])


@dataclass(frozen=True)
class Preset:
    name: str
    source: str = ""
    for_code: bool = False  # whether the rules apply to code alone. Otherwise they apply to everything else.
    rules: list[Rule] = field(default_factory=list)
    settings: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # type and pydantic's field, by name

    def setting(self, name: str, kind: Any, default: Any, words: str, *, ge: float | None = None, le: float | None = None) -> None:
        """Declare a setting. Measures read it from `TextStatistics.settings`."""
        self.settings[name] = kind, Field(default, ge=ge, le=le, description=words)

    def at_least(self, *declared: Any, **more: Any) -> Callable[[MeasureT], MeasureT]:
        return self._rule(*declared, is_least=True, **more)

    def at_most(self, *declared: Any, **more: Any) -> Callable[[MeasureT], MeasureT]:
        return self._rule(*declared, is_least=False, **more)

    def _rule(
        self,
        reason: str,
        what: str,
        setting: str,
        kind: Any,
        default: Any,
        *,
        is_least: bool,
        ge: float | None = None,
        le: float | None = None,
        sizes: Sequence[int] = (),
        applies: Callable[[Any], Any] | None = None,
    ) -> Callable[[MeasureT], MeasureT]:
        """Return a decorator of the measure. Each of `sizes` makes a rule; then measure and `what` take the size."""

        def register(measure: MeasureT) -> MeasureT:
            self.setting(setting, kind, default, " ".join(str(measure.__doc__).split()), ge=ge, le=le)
            for place, size in enumerate(sizes):
                sized = partial(measure, size=size)
                self.rules.append(Rule(reason, what.format(size), sized, setting, is_least, place, applies))
            if not sizes:
                self.rules.append(Rule(reason, what, measure, setting, is_least, None, applies))
            return measure

        return register
