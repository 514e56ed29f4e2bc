"""An evaluation as text: one line with the total, and a table for each kind of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.evaluation.results import Evaluation, Score

__all__ = ["describe_evaluation"]


def describe_evaluation(evaluation: Evaluation, step: int, by: Sequence[str]) -> str:
    """Return the total as a line of text, and a table for each name in `by` (source, kind, length)."""
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
