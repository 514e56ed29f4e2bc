"""Judges the texts of a batch by the rules about their form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.config import HeuristicConfig, Kind
from data_pipeline.documents import Reason
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.heuristics.statistics import TextStatistics
from data_pipeline.text.batch import TextBatch

__all__ = ["BrokenRule", "judge_form"]


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """The rule that a text breaks."""

    reason: Reason
    detail: str  # the measured value, and the setting that bounds it with its value


def judge_form(
    batch: TextBatch, kinds: Sequence[Kind], languages: Sequence[str], settings: HeuristicConfig
) -> list[BrokenRule | None]:
    """Return, for each text of the batch, the first rule of the chosen presets that it breaks; None if it breaks none."""
    broken: list[BrokenRule | None] = [None] * len(batch)
    is_code_D = np.array([kind == "code" for kind in kinds], np.bool_)
    texts = TextStatistics(batch, np.array([language == "en" for language in languages], np.bool_), settings)
    for preset in (PRESETS[name] for name in dict.fromkeys(settings.presets)):
        is_open_D = np.array([rule is None for rule in broken], np.bool_) & (is_code_D == preset.for_code)
        for rule in preset.rules:
            if not is_open_D.any():
                break
            values_D, bound = rule.measure(texts), rule.bound(settings)
            breaks_D = is_open_D & (values_D < bound if rule.is_least else values_D > bound)
            if rule.applies is not None:
                breaks_D &= rule.applies(texts)
            for number in np.flatnonzero(breaks_D):
                setting = rule.setting if rule.place is None else f"{rule.setting}[{rule.place}]"
                detail = f"{rule.what}: {values_D[number]:.4g}, heuristics.{setting} = {bound:.9g}"
                broken[number] = BrokenRule(Reason(rule.reason), detail)
            is_open_D &= ~breaks_D
    return broken
