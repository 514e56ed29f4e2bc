"""How the next token is chosen from logits, for several rows at once.

B rows   V vocabulary

Logits pass through these filters, in this order; each that is at its neutral value does nothing:

    1. repetition_penalty   logits of tokens that stand in the row already: divided where positive, multiplied where negative
    2. temperature          all logits are divided by it; 0 ends here and takes the likeliest token, the lowest id of equals
    3. top_k                all but the k likeliest tokens are removed; of equals at the border those with the lowest ids stay
    4. top_p                of what is left, the fewest likeliest tokens stay that together have this share of the probability
    5. min_p                of what is left, tokens stay whose probability is at least this share of the likeliest one's

Each logit that is left then gets Gumbel noise, and the token with the highest sum is chosen. This draws exactly from the softmax of
the logits (Gumbel, 1954; Maddison, Tarlow and Minka, 2014: A* Sampling, section 2). The noise is a function of the seed, the row's
number, the number of the draw and the token's id. So a row neither sees nor moves the noise of another, and a rounding error in
the logits changes a token only if the two highest sums are closer than the error. A uniform number and the cumulative distribution
would draw as well, but there the errors of all ids before a token add up at its edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from common.errors import CheckpointError, ConfigError
from common.settings.messages import explain
from trainer.inference.sampling_options import SamplingOptions

__all__ = ["GumbelNoise", "Sampling", "choose_tokens", "filtered_logits"]

_LEAST_EXPONENTIAL = 1e-300
"""Instead of 0, whose noise would be infinite and could not be added to the logit of a token that was removed."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends.

    Raises:
        ConfigError: a value is out of its bounds.
    """

    max_tokens: int = 128
    """Tokens of the longest continuation."""
    temperature: float = 1.0
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that together have this probability (nucleus; Holtzman et al., 2020)."""
    min_p: float = 0.0
    """Choose among the tokens that have at least this share of the likeliest one's probability (Nguyen et al., 2024)."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the continuation less likely (Keskar et al., 2019: CTRL, section 4.1)."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation before them."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a continuation, beside the tokenizer's end of text."""
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            SamplingOptions(**{name: getattr(self, name) for name in SamplingOptions.model_fields})
        except ValidationError as error:
            raise ConfigError(explain(SamplingOptions, error)) from None


class GumbelNoise:
    """Noise for each row and token: a function of seed, row, draw and id, so it is the same in any batch.

    Args:
        seed: of all rows.
        rows: their numbers.
    """

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._keys = [np.random.SeedSequence((seed, row)).generate_state(2, np.uint64) for row in rows]
        self._draw = 0

    def next(self, vocab_size: int) -> Tensor:
        """The noise of the next draw of all rows, (B, V), fp64 and finite."""
        exponential_BV = np.stack([self._exponential(key, vocab_size) for key in self._keys])
        self._draw += 1
        return -torch.from_numpy(exponential_BV).clamp_(min=_LEAST_EXPONENTIAL).log_()

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these places of the batch alone."""
        self._keys = [self._keys[row] for row in rows]

    def _exponential(self, key: NDArray[np.unsignedinteger[Any]], vocab_size: int) -> NDArray[np.float64]:
        """Numbers of one draw; their negative logarithms have the Gumbel distribution."""
        counter = np.array([0, self._draw, 0, 0], np.uint64)  # a draw uses up less than the 2^64 values of the first word
        return np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_exponential(vocab_size)


def choose_tokens(logits_BV: Tensor, seen_BV: Tensor | None, noise: GumbelNoise, sampling: Sampling) -> Tensor:
    """The next token of each row, (B,), int64.

    Args:
        logits_BV: of the next token, on the CPU.
        seen_BV: true where a token stands in the row already; needed for a repetition penalty only.
        noise: of the same rows; a temperature of 0 uses none.
        sampling: the settings.

    Raises:
        CheckpointError: the logits are not numbers.
    """
    if logits_BV.isnan().any() or not logits_BV.amax(dim=1).isfinite().all():
        raise CheckpointError(
            "the model's output is not finite, so there is nothing to draw from; choose a checkpoint from before its weights broke"
        )
    filtered_BV = filtered_logits(logits_BV, seen_BV, sampling)
    if sampling.temperature == 0:
        return filtered_BV.argmax(dim=1)
    return (filtered_BV + noise.next(filtered_BV.shape[1])).argmax(dim=1)


def filtered_logits(logits_BV: Tensor, seen_BV: Tensor | None, sampling: Sampling) -> Tensor:
    """The logits whose softmax is drawn from, (B, V), fp64, minus infinity for what was removed; see the top of this file.

    With a temperature of 0 they are the logits after the repetition penalty.
    """
    logits_BV = logits_BV.double()
    if sampling.repetition_penalty != 1 and seen_BV is not None:
        logits_BV = torch.where(seen_BV, _penalised(logits_BV, sampling.repetition_penalty), logits_BV)
    if sampling.temperature == 0:
        return logits_BV
    logits_BV = (logits_BV - logits_BV.amax(dim=1, keepdim=True)) / sampling.temperature
    if sampling.top_k is not None or sampling.top_p < 1:
        logits_BV = _likeliest(logits_BV, sampling)
    if sampling.min_p > 0:
        smallest_B1 = logits_BV.amax(dim=1, keepdim=True) + np.log(sampling.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < smallest_B1, -torch.inf)
    return logits_BV


def _penalised(logits_BV: Tensor, penalty: float) -> Tensor:
    """CTRL divides every logit; dividing a negative one would make its token likelier."""
    return torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)


def _likeliest(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p over what it leaves."""
    sorted_BV, order_BV = logits_BV.sort(dim=1, descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_BV[:, sampling.top_k :] = -torch.inf
    if sampling.top_p < 1:
        probabilities_BV = sorted_BV.softmax(dim=1)
        before_BV = probabilities_BV.cumsum(dim=1) - probabilities_BV  # so that the token that crosses top_p is kept
        sorted_BV = sorted_BV.masked_fill(before_BV >= sampling.top_p, -torch.inf)
    return torch.full_like(logits_BV, -torch.inf).scatter_(1, order_BV, sorted_BV)
