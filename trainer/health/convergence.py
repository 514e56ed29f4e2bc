"""The checks of all evaluations in docs/evaluation.md ("Convergence"), as pure functions of the evaluations.

The gap is not known if training minimises another loss than evaluations measure: an extension's loss or training step, smoothing,
z-loss, a temperature, or a mean over sequences. A Mann-Kendall score of 3 comes from noise alone in one of 2,000 windows of ten. An
alert is raised at the first evaluation at which its rule is broken, and again only after a window of evaluations without it.
An evaluation whose loss is not a number is no improvement, and is not part of a window.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from trainer.config import EvalConfig, LossConfig
from trainer.runs.events import AlertEvent, EvalEvent
from trainer.runs.rules import RULES
from trainer.runs.state import Evaluated, LossSums

_LEAST_TREND = 3
_LEAST_SCORE = 3.0


@dataclass(frozen=True)
class Trend:
    slope: float  # units of y for one of x: the median of the slopes between all pairs of points (Theil, 1950; Sen, 1968)
    score: float
    """Number of rising pairs less number of falling pairs, in standard deviations of a series without a trend (Mann, 1945;
    Kendall, 1975)."""


def trend(x: Sequence[float], y: Sequence[float]) -> Trend:
    """Return the trend of y over x. Pairs of equal x are left out; with fewer than two different x the trend is zero.

    The score is `S / sqrt(n (n - 1) (2 n + 5) / 18)`, where S is the number of rising pairs less that of falling pairs among n
    points. The slope tolerates up to 29 % of arbitrary points.
    """
    x_N, y_N = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(x_N), 1)
    run = x_N[second] - x_N[first]
    rise = (y_N[second] - y_N[first])[run != 0]
    run = run[run != 0]
    if not len(run):
        return Trend(0.0, 0.0)
    count = len(x_N)
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return Trend(float(np.median(rise / run)), float(np.sign(rise * run).sum()) / deviation)


class LossMean:
    def __init__(self, state: LossSums | None = None) -> None:
        self._total, self._steps = (0.0, 0) if state is None else (state.total, state.steps)

    def add(self, loss: float) -> None:
        if math.isfinite(loss):
            self._total, self._steps = self._total + loss, self._steps + 1

    def take(self) -> float | None:
        mean = self._total / self._steps if self._steps else None
        self._total, self._steps = 0.0, 0
        return mean

    @property
    def state(self) -> LossSums:
        return LossSums(total=self._total, steps=self._steps)


def is_comparable(loss: LossConfig, *, custom_loss: bool) -> bool:
    """Return whether the training loss is the cross-entropy over all targets, which evaluations measure."""
    plain = LossConfig(chunk_tokens=loss.chunk_tokens)
    return not custom_loss and loss == plain


def with_convergence(event: EvalEvent, evaluations: Sequence[Evaluated], settings: EvalConfig, *, comparable: bool) -> EvalEvent:
    last = evaluations[-1]
    gap = last.val_loss - last.train_loss if comparable and last.val_loss is not None and last.train_loss is not None else None
    numbers = [evaluated for evaluated in evaluations if evaluated.val_loss is not None][-settings.plateau_window :]
    slope = _Losses.of(numbers, "val_loss").trend.slope * 1000 if len(numbers) >= _LEAST_TREND else None
    return replace(event, train_loss=last.train_loss, gap=gap, trend=slope)


def judge_convergence(evaluations: Sequence[Evaluated], settings: EvalConfig) -> list[AlertEvent]:
    """Return the alerts of rules that are broken from the last of these evaluations on. Value: relative change of the loss."""
    if not evaluations or evaluations[-1].val_loss is None:
        return []
    numbers = [evaluated for evaluated in evaluations if evaluated.val_loss is not None]
    size, threshold = settings.plateau_window, settings.plateau_threshold
    if len(numbers) < size:
        return []
    earlier: set[str] = set()
    for end in range(max(size, len(numbers) - size), len(numbers)):
        earlier |= {alert.rule for alert in _broken(numbers[end - size : end], threshold)}
    return [alert for alert in _broken(numbers[-size:], threshold) if alert.rule not in earlier]


def _broken(window: Sequence[Evaluated], threshold: float) -> list[AlertEvent]:
    validation, training = _Losses.of(window, "val_loss"), _Losses.of(window, "train_loss")
    rise, found = validation.relative_change, list[tuple[str, dict[str, float]]]()
    if abs(rise) < threshold:
        found.append(("plateau", {}))
    is_trained = len(training.steps) == len(window)  # else the training losses are not known
    if (
        is_trained
        and min(rise, -training.relative_change) > threshold
        and min(validation.trend.score, -training.trend.score) >= _LEAST_SCORE
    ):
        found.append(("overfitting", {"rise": validation.change, "fall": -training.change}))
    first, last, alerts = window[0].step, window[-1].step, []
    for rule, facts in found:
        text = RULES[rule].text.format(value=rise, threshold=threshold, num=len(window), first=first, last=last, **facts)
        alerts.append(AlertEvent(rule, last, RULES[rule].severity, text, "log", rise, threshold))
    return alerts


@dataclass(frozen=True)
class _Losses:
    steps: list[int]
    losses: list[float]

    @staticmethod
    def of(window: Sequence[Evaluated], name: Literal["val_loss", "train_loss"]) -> _Losses:
        known = [(evaluated.step, loss) for evaluated in window if (loss := getattr(evaluated, name)) is not None]
        return _Losses([step for step, _ in known], [loss for _, loss in known])

    @cached_property
    def trend(self) -> Trend:
        return trend(self.steps, self.losses)

    @property
    def change(self) -> float:
        return self.trend.slope * (self.steps[-1] - self.steps[0])

    @property
    def relative_change(self) -> float:
        """`change` as a share of the median loss. It exceeds 1 if most losses are small beside the change."""
        level = abs(statistics.median(self.losses))
        return self.change / level if level else math.copysign(math.inf, self.change) if self.change else 0.0
