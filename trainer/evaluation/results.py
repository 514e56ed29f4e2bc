from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainer.runs.events import EvalEvent, MeasuresEvent, Score


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
        return self.total.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        return self.total.bits_per_byte

    @property
    def groups(self) -> dict[str, Mapping[str, Score]]:
        return self.event(0).groups

    def event(self, step: int) -> EvalEvent:
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


def describe_evaluation(evaluation: Evaluation, step: int, by: Sequence[str]) -> str:
    total = evaluation.total
    per_byte = "" if total.bits_per_byte is None else f"  bits per byte {total.bits_per_byte:.4f}"
    perplexity = "" if total.perplexity is None else f"  perplexity {total.perplexity:.2f}"
    first = (
        f"step {step}  validation loss {total.loss:.4f}{perplexity}{per_byte}  "
        f"({total.num_targets:,} targets in {evaluation.num_rows:,} rows)"
    )
    tables = [_table(name, evaluation.groups[name], total.num_targets) for name in by]
    return "\n\n".join([first, *tables])


def _table(name: str, groups: Mapping[str, Score], num_targets: int) -> str:
    has_perplexity = any(score.has_perplexity for score in groups.values())
    cells = [(name, "loss", *(["perplexity"] if has_perplexity else []), "bits/byte", "targets", "share")]
    for group, score in groups.items():
        perplexity = [] if score.perplexity is None else [f"{score.perplexity:.2f}"]
        per_byte = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        share = f"{score.num_targets / max(1, num_targets):.1%}"
        cells.append((group, f"{score.loss:.4f}", *perplexity, per_byte, f"{score.num_targets:,}", share))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in cells)
