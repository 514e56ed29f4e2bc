"""The results of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from trainer.runs.events import EvalEvent, MeasuresEvent, Score

__all__ = ["Evaluation", "Score"]


@dataclass(frozen=True)
class Evaluation:
    """The validation loss, in total and by group."""

    loss: float
    """Mean over all targets, in nats."""
    num_rows: int
    num_targets: int
    num_bytes: int = 0
    """UTF-8 bytes of the targets' text, 0 if they were not counted."""
    by_source: Mapping[str, Score] = field(default_factory=dict)
    by_kind: Mapping[str, Score] = field(default_factory=dict)
    """Scores by the kind of the target's document: `prose`, `web` or `code` (see `Grouping.documents` for older data)."""
    by_length: Mapping[str, Score] = field(default_factory=dict)
    """Scores by the length in tokens of the target's document, shortest first: see `length_ranges`."""
    measured: Callable[[int], MeasuresEvent] | None = None
    """Returns the event with the measures of the objective at a step; None if it has none. With them the loss is that of the
    objective, so there is no perplexity."""

    @property
    def total(self) -> Score:
        return Score(self.loss, self.num_targets, self.num_bytes, self.measured is None)

    @property
    def perplexity(self) -> float | None:
        """`exp(loss)`, infinite if that overflows; None if it has no meaning."""
        return self.total.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        return self.total.bits_per_byte

    @property
    def groups(self) -> dict[str, Mapping[str, Score]]:
        """All groups, by the property that divides them: source, kind, length."""
        return self.event(0).groups

    def event(self, step: int) -> EvalEvent:
        """Return the event of this evaluation at a step."""
        total = self.total
        by_source, by_kind, by_length = (
            {name: replace(score, has_perplexity=total.has_perplexity) for name, score in scores.items()}
            for scores in (self.by_source, self.by_kind, self.by_length)
        )
        return EvalEvent(
            step,
            self.loss,
            self.num_targets,
            total.bits_per_byte,
            by_source=by_source,
            by_kind=by_kind,
            by_length=by_length,
            num_rows=self.num_rows,
            has_perplexity=total.has_perplexity,
        )
