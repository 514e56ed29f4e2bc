from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import QualityConfig
from data_pipeline.documents import Reason
from data_pipeline.quality.classifier import PROBABILITY_STEPS
from data_pipeline.quality.perplexity import MAX_SCORE, SCORE_STEPS, Scores


@dataclass(frozen=True)
class Bounds:
    """Scores between which a source's documents are kept, inclusive."""

    min_score: int
    max_score: int
    min_probability: int  # minimum probability of the classifier, in steps of 1/1000


def resolve_bounds(histogram: Mapping[str, int], settings: QualityConfig) -> Bounds:
    """Return the bounds of a source whose documents have these scores. Of a value and a percentile the stricter one applies."""
    scores = np.array(sorted(map(int, histogram)), np.int64)
    cumulative = np.cumsum([histogram[str(score)] for score in scores.tolist()])
    lows, highs = [0], [MAX_SCORE]
    if settings.min_perplexity is not None:
        lows.append(math.ceil(SCORE_STEPS * math.log2(settings.min_perplexity)))
    if settings.max_perplexity is not None:
        highs.append(math.floor(SCORE_STEPS * math.log2(settings.max_perplexity)))
    if len(scores):
        total = int(cumulative[-1])
        if (percentile := settings.min_perplexity_percentile) is not None:
            place = int(np.searchsorted(cumulative * 100, percentile * total, side="right"))
            lows.append(int(scores[min(place, len(scores) - 1)]))
        if (percentile := settings.max_perplexity_percentile) is not None:
            highs.append(int(scores[np.searchsorted(cumulative * 100, percentile * total, side="left")]))
    return Bounds(max(lows), min(highs), math.ceil(settings.min_good_probability * PROBABILITY_STEPS))


FATES = (None, Reason.PERPLEXITY_LOW, Reason.PERPLEXITY_HIGH, Reason.CLASSIFIED_BAD)  # what the numbers of `judge` mean


def judge(bounds: Bounds, scores_D: Scores | None, probabilities_D: Scores | None) -> NDArray[np.uint8]:
    """Return an index into `FATES` for each document, the first that applies. None as scores skips their bounds."""
    given = scores_D if scores_D is not None else probabilities_D
    fates_D = np.zeros(0 if given is None else len(given), np.uint8)
    if probabilities_D is not None:
        fates_D[probabilities_D < bounds.min_probability] = FATES.index(Reason.CLASSIFIED_BAD)
    if scores_D is not None:
        fates_D[scores_D > bounds.max_score] = FATES.index(Reason.PERPLEXITY_HIGH)
        fates_D[scores_D < bounds.min_score] = FATES.index(Reason.PERPLEXITY_LOW)
    return fates_D
