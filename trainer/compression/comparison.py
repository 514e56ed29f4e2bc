from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from common.text import format_bytes
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TextModel

_PROMPTS = ("The", "A", "In", "def")
_TOKENS = 16  # Length of a text. Short rounds are more often without a disturbance.
_ROUNDS, _SECONDS = 30, 20.0  # rounds end at the first of both limits, but after the first measured round at the earliest


@dataclass(frozen=True)
class Measured:
    weight_bytes: int
    memory_bytes: int  # Bytes of the weights of the loaded model. A shared weight counts once.
    tokens_per_s: float  # speed at which the model writes four texts at a time
    perplexity: float | None  # perplexity on the validation data; None if the data is not there


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def speeds(models: Sequence[TextModel]) -> list[float]:
    """Return how many tokens a second each model writes: its fastest round, after one that prepares kernels and caches.

    The models take turns, so that other work on the machine slows down all of them.
    """
    sampling = Sampling(max_tokens=_TOKENS, temperature=0.0)
    rounds: list[list[float]] = []
    end = time.perf_counter() + _SECONDS
    while len(rounds) < 2 or (len(rounds) <= _ROUNDS and time.perf_counter() < end):
        rates = []
        for model in models:
            start = time.perf_counter()
            written = model.complete(_PROMPTS, sampling)
            rates.append(sum(len(one.tokens) for one in written) / (time.perf_counter() - start))
        rounds.append(rates)
    return [max(rates) for rates in zip(*rounds[1:], strict=True)]


def table(before: Measured, after: Measured) -> str:
    rows = [("", "before", "after", "change"), _row("on disk", before.weight_bytes, after.weight_bytes, format_bytes)]
    rows.append(_row("in memory", before.memory_bytes, after.memory_bytes, format_bytes))
    rows.append(_row("tokens/s", before.tokens_per_s, after.tokens_per_s, lambda value: f"{value:,.0f}"))
    rows.append(_row("perplexity", before.perplexity, after.perplexity, lambda value: f"{value:.4g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = (
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, before: float | None, after: float | None, shown: Callable[[Any], str]) -> tuple[str, str, str, str]:
    if before is None or after is None:
        return name, "-", "-", "no data"
    return name, shown(before), shown(after), f"{after / before - 1:+.1%}" if before else "-"
