"""How often each training document is taken, so that groups of documents have the shares that the user asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text.ngrams import mix_hashes

__all__ = ["copies_of_documents", "repeats_of_groups"]


def repeats_of_groups(tokens: Mapping[str, int], weights: Mapping[str, float], max_repeats: float) -> dict[str, float]:
    """How often the documents of each group are taken on average, from 0 to `max_repeats`.

    The shares of the groups' tokens come out as their weights, and as much is taken as that allows: the group that is shortest for
    its weight is repeated `max_repeats` times, the others less. Groups without a weight have weight 1, groups without tokens none.
    """
    wanted = {group: weights.get(group, 1.0) for group, count in tokens.items() if count}
    scale = min((max_repeats * tokens[group] / weight for group, weight in wanted.items() if weight), default=0.0)
    return {group: scale * weight / tokens[group] for group, weight in wanted.items()}


def copies_of_documents(ids_D: NDArray[np.uint64], repeats: float, seed: int) -> NDArray[np.uint8]:
    """How often each document is taken so that it is `repeats` times on average; a document's id and the seed decide alone."""
    whole = math.floor(repeats)
    fractions_D = (mix_hashes(ids_D + mix_hashes(np.array([seed], np.uint64))) >> np.uint64(11)) * 2.0**-53
    return (whole + (fractions_D < repeats - whole)).astype(np.uint8)
