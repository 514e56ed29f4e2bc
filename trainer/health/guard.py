"""The guard: judges loss and gradient norm of each step, and decides whether to log, skip, roll back or stop.

Nothing here touches a device or a file. All ranks judge the same numbers, so they reach the same verdict without communication.

The loss is compared with the last healthy losses. Their level is the median, or that of the newest losses while the loss falls.
Their noise is the larger of two robust estimates: the median difference of neighbours, the successive differences of von Neumann,
Kent, Bellinson and Hart (1941) with a median (Hampel, 1974) in place of the mean; and the median deviation from a straight line,
which also sees correlated noise. Heavy tails and correlations over longer times widen the range by the run's own past, see
`Excesses`. A drop is measured from the lowest loss, because the median of a falling loss lags behind it.

A divergence may climb too slowly for that. It is found by the median of the newest eighth of the losses: while this median is too
far above the level, each loss that is as far above the level counts as a spike. In the first steps of a run the noise is not known
yet. There a loss is a spike if it is a large share of the level above it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import Literal

from trainer.config import Action, GuardConfig
from trainer.runs.events import AlertEvent
from trainer.runs.rules import RULES, Severity
from trainer.runs.state import ExcessRows, GuardState

_KEPT = 1024
_BLOCK = 16  # steps between two estimates of the tail
_NEWER = 2  # steps that may be known before the estimate may use them
_LEAST, _LEAST_NOISES = 16, 256
_LARGEST = 4
_NORMAL = NormalDist()
_UPPER_QUARTILE = _NORMAL.inv_cdf(0.75)
_TOLERANCE, _EXPONENT = 1.05, 3.0
"""The largest excesses of normal noise exceed their expected mean by up to 5 %. The limit grows with the third power of what is
beyond that: by simulation, the least power with which log-normal noise (sigma 1) has about one false alarm in 20,000 steps."""
_MOST = 1e6


@dataclass(frozen=True)
class Tail:
    spread: float = 1.0
    """Factor on the unit by which the excesses are spread more widely than normal noise of this unit; at least 1."""
    heaviness: float = 1.0  # further factor on the limit for tails that are heavier than those of normal noise; at least 1
    largest: float = 0.0  # mean of the largest excesses, in units
    largest_of_normal: float = math.inf  # the same mean for as many draws of normal noise, in its standard deviations
    climb: float = 0.0  # standard deviation of the newest level above the level of the window, in units
    noise: float = 0.0  # median of the noise that was measured in these steps, in nats; 0 if they are few
    num: int = 0


class Excesses:
    """How far the last losses of a run were above their expected level: the upper tail of a run's own noise.

    The guard measures the noise in a window of losses. That noise is too small if losses are correlated over more than the window,
    or if large values are more frequent than in normal noise. Both show in the past excesses: in their spread (the upper quartile),
    and in the mean of the largest ones compared with that of as many normal draws.
    """

    def __init__(self, rows: ExcessRows | None = None) -> None:
        self._rows: deque[tuple[int, float, float, float]] = deque(maxlen=_KEPT + _BLOCK + _NEWER)
        if rows is not None:
            self._rows.extend(zip(rows.steps, rows.excesses, rows.climbs, rows.noises, strict=True))
        self._tails: dict[int, Tail] = {}

    def add(self, step: int, excess: float, climb: float, noise: float) -> None:
        self._rows.append((step, _rounded(excess), _rounded(climb), _rounded(noise)))

    def tail(self, known: int) -> Tail:
        """Return the tail of the steps up to the last multiple of 16 that is not above `known`."""
        block = known // _BLOCK * _BLOCK
        if block not in self._tails:
            self._tails = {at: tail for at, tail in self._tails.items() if at == block - _BLOCK}
            self._tails[block] = _tail([row[1:] for row in self._rows if row[0] <= block][-_KEPT:])
        return self._tails[block]

    @property
    def rows(self) -> ExcessRows:
        return ExcessRows(
            steps=[row[0] for row in self._rows],
            excesses=[row[1] for row in self._rows],
            climbs=[row[2] for row in self._rows],
            noises=[row[3] for row in self._rows],
        )


def _tail(rows: Sequence[tuple[float, float, float]]) -> Tail:
    num = len(rows)
    if num < _LEAST:
        return Tail(num=num)
    excesses, climbs, noises = map(sorted, zip(*rows, strict=True))
    quartile = 3 * num // 4
    spread = max(1.0, excesses[quartile] / _UPPER_QUARTILE)
    part = _LARGEST / num
    of_normal = _NORMAL.pdf(_NORMAL.inv_cdf(1 - part)) / part
    largest = fmean(excesses[-_LARGEST:])
    heaviness = max(1.0, largest / of_normal / spread / _TOLERANCE) ** _EXPONENT
    usual = noises[num // 2] if num >= _LEAST_NOISES else 0.0
    return Tail(spread, heaviness, largest, of_normal, max(0.0, climbs[quartile] / _UPPER_QUARTILE), usual, num)


def _rounded(value: float) -> float:
    return float(f"{max(-_MOST, min(_MOST, value)):.3g}") if not math.isnan(value) else 0.0


_SEVERITY: dict[Action, int] = {"log": 0, "skip": 1, "rollback": 2, "stop": 3}
_PATIENCE = 3
_LEAST_HISTORY = 8  # losses that a reliable estimate of the noise needs; with fewer, no loss is a drop
_SURE_HISTORY = 12
"""With n losses below this number, the floor is multiplied by this number over n: level and noise are still uncertain."""
_NEWEST_PART = 8
_DEVIATION_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard deviation of the median of n normal draws, over that of their mean (Laplace, 1818)."""
_LEAST_LEVEL = 0.01  # In nats. A loss below this level counts as this level, so that its small changes are not relatively large.
_DEVIATION_PER_MEDIAN = 1 / 0.674490  # standard deviation over the median absolute deviation, for normal noise
_FULL_WINDOW = 128
"""With fewer losses than this and than the window has, slow changes of the level and a small noise are not judged."""
_YOUNG_FLOOR = 1.5  # factor on the floor while the window is not full, because losses may be correlated over many steps
_YOUNG_NOISE = 8
"""With n past excesses, the noise counts as 1 + 8 / (n + 8) times as large: it is uncertain, and its tail is not known."""
_FLOOR_OF_KNOWN_NOISE = 0.75  # the floor does not count if the limit that follows from the noise is at least this share of it
_LESS_NOISE = 0.7  # noise of the window that is below this share of the run's usual noise has really become less
_HEAVY = 1.2  # if the largest excesses are this many times those of normal noise, the limit is at least twice as large as they are
_MOST_OF_PAST = 5.0  # large past excesses raise the limit by at most this many levels, so that ten times the loss is always found
_CLIMB_OF_CORRELATED = 0.45
"""Deviation of the newest level from the window's, over the noise, from which losses are correlated; 0.29 if they are not."""
_FEW_CLIMBS = 150
"""With n steps, losses must be 1 + 150 / n times as correlated, because few independent changes of the level are known."""
_FACTOR_OF_CORRELATED = 7.0
_CAP = 1.5  # a spike counts as this many times its limit in the past excesses


@dataclass(frozen=True)
class Verdict:
    action: Literal["none", "log", "skip", "rollback", "stop"] = "none"
    """skip: the step itself withheld the update, see `Thresholds`."""
    rule: str | None = None  # the broken rule with the most severe action; None if no rule is broken
    message: str = ""  # what was found, what follows and what to do, for the user; empty if no rule is broken
    streak: int = 0  # steps in a row that broke this rule, with this one

    @property
    def is_news(self) -> bool:
        """Whether to report it: a rollback or stop always, a rule that stays broken at the 1st, 2nd, 4th, 8th … step.

        A gradient that is too large and only logged is reported from the third step in a row on, at the 3rd, 6th, 12th … step: a
        single one is clipped, and healthy runs have some in their first steps.
        """
        patience = _PATIENCE if (self.rule, self.action) == ("exploding", "log") else 1
        times, rest = divmod(self.streak, patience)
        return self.action in ("rollback", "stop") or (times > 0 and rest == 0 and times & (times - 1) == 0)


@dataclass(frozen=True)
class Thresholds:
    """Limits beyond which a step withholds its update. It also does so if loss or gradient norm is not finite."""

    skip_norm_above: float = math.inf
    skip_norm_below: float = -math.inf
    skip_loss_above: float = math.inf
    skip_loss_below: float = -math.inf


@dataclass(frozen=True)
class _LossRange:
    low: float = -math.inf
    high: float = math.inf
    described: str = ""
    level: float = math.nan
    unit: float = 0.0  # unit of the excess over `level`; 0 if it is not known
    margin: float = 0.0
    climb: float = 0.0  # how far the newest losses are above the window's, in units
    noise: float = 0.0


class Guard:
    """Judges each step by the healthy ones before it.

    `scaled` (precision fp16): a gradient that is not finite while the loss is finite belongs to the search for the scale. The step
    is skipped, `config.non_finite` does not apply, and `config.max_skips` does.
    """

    def __init__(self, config: GuardConfig, *, scaled: bool = False) -> None:
        self._config = config
        self._scaled = scaled
        self._losses: deque[tuple[int, float]] = deque(maxlen=config.loss_window + 1)  # one more, which may be too new to be used
        self._level_since = 0
        """Losses up to this step belong to an earlier level; this applies once the step itself is old enough to be used."""
        self._excesses = Excesses()
        self._streaks: dict[str, int] = {}
        self._skips_in_row = 0
        self.rollbacks = 0

    @property
    def lr_factor(self) -> float:
        return self._config.rollback_lr_factor**self.rollbacks

    def thresholds(self, step: int) -> Thresholds:
        """Return the limits for `step`, which is about to start; a limit is infinite if the action of its rule is not skip.

        They use the losses up to `step - 2` only, as `judge` does, because a host that reads results one step late has no others.
        """
        config = self._config
        expected = self._expected(step) if "skip" in (config.spike, config.drop) else _LossRange()
        return Thresholds(
            skip_norm_above=config.max_grad_norm if config.exploding == "skip" else math.inf,
            skip_norm_below=config.min_grad_norm if config.vanishing == "skip" else -math.inf,
            skip_loss_above=expected.high if config.spike == "skip" else math.inf,
            skip_loss_below=expected.low if config.drop == "skip" else -math.inf,
        )

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict:
        """Return the verdict on a step; steps come in order, each once. `loss` is in nats, `grad_norm` the norm before clipping."""
        expected = self._expected(step)
        broken = self._broken_rules(expected, loss, grad_norm)
        actions: dict[str, Action] = {rule: getattr(self._config, rule) for rule in broken}
        if "non_finite" in broken and self._scaled and math.isfinite(loss):
            actions["non_finite"] = "skip"
        self._streaks = {rule: self._streaks.get(rule, 0) + 1 for rule in broken}
        skipped = "skip" in actions.values()
        self._skips_in_row = self._skips_in_row + 1 if skipped else 0
        if not skipped and not self._streaks.keys() & {"non_finite", "spike", "drop"}:
            self._losses.append((step, loss))
        is_first = self._streaks.get("spike", 0) <= 1 and not self._streaks.keys() & {"non_finite", "drop"}
        if not skipped and is_first and expected.unit > 0:  # a spike counts once, so that frequent ones become expected
            excess = min(loss - expected.level, _CAP * expected.margin)
            self._excesses.add(step, excess / expected.unit, expected.climb, expected.noise)
        if not broken:
            return Verdict()
        worst = max(actions, key=lambda rule: _SEVERITY[actions[rule]])
        action, consequence = self._bounded(worst, actions[worst])
        if action == "log" and self._config.loss_window in (self._streaks.get("spike"), self._streaks.get("drop")):
            self._level_since = step
            consequence = f"It has lasted for guard.loss_window = {self._config.loss_window} steps and counts as normal from now on"
        streak = self._streaks[worst]
        found = "; ".join(broken.values()) + (f" ({streak} steps in a row)" if streak > 1 else "")
        return Verdict(action, worst, f"step {step}: {found}. {consequence}. {RULES[worst].text}", streak)

    def after_rollback(self, state: GuardState) -> None:
        """Restore the state of a checkpoint, and count one rollback more; the count itself is not restored."""
        rollbacks = self.rollbacks
        self.restore(state)
        self.rollbacks = rollbacks + 1

    @property
    def state(self) -> GuardState:
        return GuardState(
            steps=[step for step, _ in self._losses],
            losses=[loss for _, loss in self._losses],
            level_since=self._level_since,
            streaks=dict(self._streaks),
            skips_in_row=self._skips_in_row,
            rollbacks=self.rollbacks,
            tail=self._excesses.rows,
        )

    def restore(self, state: GuardState) -> None:
        """If the window of the state is longer than this guard's, the newest losses are kept."""
        self._losses.clear()
        self._losses.extend(zip(state.steps, state.losses, strict=True))
        self._level_since = state.level_since
        self._streaks = dict(state.streaks)
        self._skips_in_row = state.skips_in_row
        self.rollbacks = state.rollbacks
        self._excesses = Excesses(state.tail)

    def _broken_rules(self, expected: _LossRange, loss: float, grad_norm: float) -> dict[str, str]:
        """Return the rules that a step breaks, with what was found. Rules of the loss come first: they win among equal actions."""
        config = self._config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return {"non_finite": f"loss {loss:.6g} and gradient norm {grad_norm:.6g} are not both finite"}
        broken: dict[str, str] = {}
        if loss > expected.high:
            broken["spike"] = f"loss {loss:.6g} is above {expected.high:.6g}, {expected.described}"
        if loss < expected.low:
            broken["drop"] = f"loss {loss:.6g} is below {expected.low:.6g}, {expected.described}"
        if grad_norm > config.max_grad_norm:
            broken["exploding"] = f"gradient norm {grad_norm:.6g} is above guard.max_grad_norm = {config.max_grad_norm:g}"
        if grad_norm < config.min_grad_norm:
            broken["vanishing"] = f"gradient norm {grad_norm:.6g} is below guard.min_grad_norm = {config.min_grad_norm:g}"
        return broken

    def _expected(self, step: int) -> _LossRange:
        config, known = self._config, step - 2
        oldest = self._level_since + 1 if self._level_since <= known else 0
        losses = [loss for at, loss in self._losses if oldest <= at <= known][-config.loss_window :]
        if not losses:
            return _LossRange()
        level, lowest, num = median(losses), min(losses), len(losses)
        is_full = num >= min(config.loss_window, _FULL_WINDOW)
        few = max(1 if is_full or num < _LEAST_HISTORY else _YOUNG_FLOOR, _SURE_HISTORY / num)
        floor = config.spike_floor * few * max(abs(level), _LEAST_LEVEL)
        described = f"the limit after the last {num} loss{'es' * (num > 1)} (median {level:.6g}, lowest {lowest:.6g}"
        if num < _LEAST_HISTORY:
            return _LossRange(high=level + floor, described=f"{described})")
        factor, measured, tail = config.spike_factor, _noise(losses), self._excesses.tail(known)
        noise = max(measured, tail.noise) if measured > _LESS_NOISE * tail.noise else measured
        newest = losses[-(num // _NEWEST_PART) :]
        near = median(newest)
        unit = max(noise, floor / factor)
        margin = factor * noise * (1 + _YOUNG_NOISE / (tail.num + 8))
        past = factor * unit * tail.spread * tail.heaviness if tail.spread * tail.heaviness > 1 else 0.0
        if tail.largest * unit > _HEAVY * tail.largest_of_normal * noise:
            past = max(past, 2 * tail.largest * unit)
        margin = max(margin, min(past, _MOST_OF_PAST * max(abs(level), _LEAST_LEVEL)))
        if not is_full or margin < _FLOOR_OF_KNOWN_NOISE * floor:
            margin = max(margin, floor)
        climb = factor * noise * _DEVIATION_OF_MEDIAN / math.sqrt(len(newest))
        if tail.climb * unit > _CLIMB_OF_CORRELATED * (1 + _FEW_CLIMBS / tail.num if tail.num else math.inf) * noise:
            climb = max(climb, _FACTOR_OF_CORRELATED * tail.climb * unit)
        climb = max(climb, floor / 2)
        described = f"{described}, newest (median of {len(newest)}) {near:.6g}, noise {noise:.3g})"
        diverges = is_full and near > level + climb
        falls = is_full and near < level - factor * noise / 4
        base = near if falls else level
        high = level + climb if diverges else base + margin
        return _LossRange(lowest - max(margin, floor), high, described, base, unit, margin, (near - level) / unit, measured)

    def _bounded(self, rule: str, action: Action) -> tuple[Action, str]:
        config = self._config
        if action == "rollback" and self.rollbacks >= config.max_rollbacks:
            return "stop", f"Training stops, because the guard.max_rollbacks = {config.max_rollbacks} rollbacks are used up"
        if action == "skip" and self._skips_in_row > config.max_skips:
            updates = f"guard.max_skips = {config.max_skips} updates in a row"
            return "stop", f"Training stops, because more than {updates} were withheld"
        consequences: dict[Action, str] = {
            "log": "The update was made",
            "skip": f"The update was withheld ({self._skips_in_row} in a row, of at most {config.max_skips})",
            "rollback": (
                f"The guard requests a rollback to a checkpoint before this step ({self.rollbacks + 1} of at most "
                f"{config.max_rollbacks}). It leaves out the rows of guard.window_steps = {config.window_steps} steps"
            ),
            "stop": f"Training stops, because guard.{rule} = stop",
        }
        return action, consequences[action]


def guard_alert(verdict: Verdict, step: int, loss: float, grad_norm: float, config: GuardConfig) -> AlertEvent:
    assert verdict.rule is not None
    limits: dict[str, float | None] = {"exploding": config.max_grad_norm, "vanishing": config.min_grad_norm}
    of_gradient = verdict.rule in limits or (verdict.rule == "non_finite" and math.isfinite(loss))
    severity: Severity = "critical" if verdict.action in ("rollback", "stop") else "warning"
    value = grad_norm if of_gradient else loss
    return AlertEvent(verdict.rule, step, severity, verdict.message, verdict.action, value, limits.get(verdict.rule))


def _noise(losses: Sequence[float]) -> float:
    """Return a standard deviation of the noise of at least 8 losses, which a trend does not widen much."""
    differences = [abs(after - before) for before, after in pairwise(losses)]
    third = len(losses) // 3
    slope = (median(losses[-third:]) - median(losses[:third])) / (len(losses) - third)
    residuals = [loss - slope * place for place, loss in enumerate(losses)]
    level = median(residuals)
    deviation = median(abs(residual - level) for residual in residuals)
    return _DEVIATION_PER_MEDIAN * max(median(differences) / math.sqrt(2), deviation)
