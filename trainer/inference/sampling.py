"""Chooses the next token from logits, for several rows at once, as docs/generation.md says: filters, then Gumbel noise.

B rows   V vocabulary

The token with the highest sum of logit and noise is a draw from the softmax of the logits (Gumbel, 1954; Maddison, Tarlow and
Minka, 2014: A* Sampling, section 2). The noise of a row does not depend on other rows, and a rounding error in the logits changes a
token only if the two highest sums differ by less than the error. Drawing with a uniform number from the cumulative distribution
would be less stable, because the errors of all ids before a token add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from common.errors import CheckpointError, ConfigError
from common.settings.messages import explain
from trainer.inference.sampling_options import SamplingOptions

_LEAST_EXPONENTIAL = 1e-300
"""Replaces 0, whose infinite noise would make the sum with the logit of a removed token, minus infinity, NaN."""


class Sampling(SamplingOptions):
    """Settings that decide how tokens are chosen and when a text ends. Raises ConfigError if a value is out of its bounds."""

    stop_tokens: tuple[int, ...] = ()
    """Ids that end a continuation, in addition to the tokenizer's end of text."""

    def __init__(self, max_tokens: int = 128, *, temperature: float = 1.0, **others: Any) -> None:
        try:
            super().__init__(max_tokens=max_tokens, temperature=temperature, **others)
        except ValidationError as error:
            raise ConfigError(explain(SamplingOptions, error)) from None

    def changed(self, **values: Any) -> Sampling:
        return Sampling(**dict(self) | values)


class GumbelNoise:
    """Noise for each row and token: a function of seed, number of the row, draw and id, so it is the same in any batch."""

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._keys = [np.random.SeedSequence((seed, row)).generate_state(2, np.uint64) for row in rows]
        self._draw = 0

    def next(self, vocab_size: int) -> Tensor:
        exponential_BV = np.stack([self._exponential(key, vocab_size) for key in self._keys])
        self._draw += 1
        return torch.from_numpy(exponential_BV).clamp_(min=_LEAST_EXPONENTIAL).log_().neg_()

    def keep(self, rows: Sequence[int]) -> None:
        self._keys = [self._keys[row] for row in rows]

    def _exponential(self, key: NDArray[np.unsignedinteger[Any]], vocab_size: int) -> NDArray[np.float64]:
        counter = np.array([0, self._draw, 0, 0], np.uint64)  # a draw uses fewer than the 2^64 values of the first word
        return np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_exponential(vocab_size)


def choose_tokens(logits_BV: Tensor, seen_BV: Tensor | None, noise: GumbelNoise, sampling: Sampling) -> Tensor:
    """Return the next token of each row, (B,), int64, from logits on the CPU.

    `seen_BV` is true for tokens that the row contains; only a repetition penalty needs it. Raises CheckpointError if the logits are
    not finite.
    """
    if logits_BV.isnan().any() or not logits_BV.amax(dim=1).isfinite().all():
        raise CheckpointError(
            "the logits of the model are not finite, so no token can be drawn; use an earlier checkpoint, whose weights are finite"
        )
    filtered_BV = filtered_logits(logits_BV, seen_BV, sampling)
    if sampling.temperature == 0:
        return filtered_BV.argmax(dim=1)
    return (filtered_BV + noise.next(filtered_BV.shape[1])).argmax(dim=1)


def filtered_logits(logits_BV: Tensor, seen_BV: Tensor | None, sampling: Sampling) -> Tensor:
    """Return the logits after all filters, (B, V), fp64, with minus infinity for removed tokens."""
    logits_BV = logits_BV.double()
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        penalty = sampling.repetition_penalty
        # CTRL divides every logit, but dividing a negative logit would make its token likelier.
        penalised_BV = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV
    logits_BV = (logits_BV - logits_BV.amax(dim=1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=1, descending=True, stable=True)
        if sampling.top_k is not None:
            sorted_BV[:, sampling.top_k :] = -torch.inf
        if sampling.top_p < 1:
            probabilities_BV = sorted_BV.softmax(dim=1)
            before_BV = probabilities_BV.cumsum(dim=1) - probabilities_BV  # without the token, so the one that crosses top_p stays
            sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, -torch.inf)
        logits_BV = torch.full_like(logits_BV, -torch.inf).scatter_(1, order_BV, sorted_BV)
    if sampling.min_p > 0:
        smallest_B1 = logits_BV.amax(dim=1, keepdim=True) + np.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    return logits_BV
