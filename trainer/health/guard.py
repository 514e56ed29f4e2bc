"""The guard: judges loss and gradient norm of each step, and decides whether to log, skip, roll back or stop.

Nothing here touches a device or a file. All ranks judge the same numbers, so they reach the same verdict without communication.

The loss is compared with the last healthy losses. Their level is the median. Their noise is the median difference of neighbours,
which a falling loss hardly widens: the successive differences of von Neumann, Kent, Bellinson and Hart (1941), with a median
(Hampel, 1974) in place of the mean. A spike is measured from the level. A drop is measured from the lowest loss, because the
median of a falling loss lags behind it.

A divergence may climb too slowly for that. It is found by the median of the newest eighth of the losses: while this median is too
far above the level, each loss that is as far above the level counts as a spike. In the first steps of a run the noise is not known
yet. There a loss is a spike if it is a large share of the level above it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from trainer.config import Action, GuardConfig

__all__ = ["Guard", "GuardRule", "Thresholds", "Verdict"]

GuardRule = Literal["non_finite", "exploding", "vanishing", "spike", "drop"]
"""The setting `guard.RULE` is the action of the rule."""

_SEVERITY: dict[Action, int] = {"log": 0, "skip": 1, "rollback": 2, "stop": 3}
_PATIENCE = 3
_LEAST_HISTORY = 8
"""Losses that a reliable estimate of the noise needs; with fewer, no loss is a drop."""
_SURE_HISTORY = 12
"""With n losses below this number, the floor is multiplied by this number over n: level and noise are still uncertain."""
_NEWEST_PART = 8
"""The newest losses are the last eighth of the known losses."""
_DEVIATION_OF_MEDIAN = math.sqrt(math.pi / 2)
"""Standard deviation of the median of n normal draws, over that of their mean (Laplace, 1818)."""
_LEAST_LEVEL = 0.01
"""In nats. A loss below this level counts as this level, so that its small changes are not relatively large."""
_DEVIATION_PER_DIFFERENCE = 1 / (0.674490 * math.sqrt(2))
"""Standard deviation over the median absolute difference of two draws, for normal noise."""


@dataclass(frozen=True)
class Verdict:
    """The guard's decision about a step."""

    action: Literal["none", "log", "skip", "rollback", "stop"] = "none"
    """skip: the step itself withheld the update, see `Thresholds`."""
    rule: GuardRule | None = None
    """The broken rule with the most severe action; None if no rule is broken."""
    message: str = ""
    """What was found, what follows and what to do, for the user; empty if no rule is broken."""
    streak: int = 0
    """Steps in a row that broke this rule, with this one."""

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

    def skips(self, loss: float, grad_norm: float) -> bool:
        """Return whether the update is withheld; the device computes the same in fp64 from the same two numbers."""
        healthy = self.skip_norm_below <= grad_norm <= self.skip_norm_above and self.skip_loss_below <= loss <= self.skip_loss_above
        return not (healthy and math.isfinite(loss) and math.isfinite(grad_norm))


@dataclass(frozen=True)
class _LossRange:
    """The range of a healthy loss, from the last healthy losses."""

    low: float = -math.inf
    high: float = math.inf
    described: str = ""


class Guard:
    """Judges each step by the healthy ones before it.

    Args:
        config: the settings.
        scaled: gradients are scaled (precision fp16). A gradient that is not finite while the loss is finite then belongs to the
            search for the scale: the step is skipped, `config.non_finite` does not apply, and `config.max_skips` does.
    """

    def __init__(self, config: GuardConfig, *, scaled: bool = False) -> None:
        self._config = config
        self._scaled = scaled
        self._losses: deque[tuple[int, float]] = deque(maxlen=config.loss_window + 1)  # one more, which may be too new to be used
        self._level_since = 0
        """Losses up to this step belong to an earlier level; this applies once the step itself is old enough to be used."""
        self._streaks: dict[str, int] = {}
        self._skips_in_row = 0
        self._rollbacks = 0

    @property
    def rollbacks(self) -> int:
        """Rollbacks of the run so far."""
        return self._rollbacks

    @property
    def lr_factor(self) -> float:
        """Factor on the learning rate since the last rollback."""
        return self._config.rollback_lr_factor**self._rollbacks

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
        """Return the verdict on a step; steps come in order, each once.

        Args:
            step: its number.
            loss: of the global batch, in nats.
            grad_norm: global norm of the gradient, before clipping.
        """
        broken = self._broken_rules(step, loss, grad_norm)
        actions = {rule: self._action(rule, loss) for rule in broken}
        self._streaks = {rule: self._streaks.get(rule, 0) + 1 for rule in broken}
        skipped = "skip" in actions.values()
        self._skips_in_row = self._skips_in_row + 1 if skipped else 0
        if not skipped and not self._streaks.keys() & {"non_finite", "spike", "drop"}:
            self._losses.append((step, loss))
        if not broken:
            return Verdict()
        worst = max(actions, key=lambda rule: _SEVERITY[actions[rule]])
        action, consequence = self._bounded(worst, actions[worst])
        if action == "log" and self._config.loss_window in (self._streaks.get("spike"), self._streaks.get("drop")):
            self._level_since = step
            consequence = f"It has lasted for guard.loss_window = {self._config.loss_window} steps and counts as normal from now on"
        streak = self._streaks[worst]
        found = "; ".join(broken.values()) + (f" ({streak} steps in a row)" if streak > 1 else "")
        return Verdict(action, worst, f"step {step}: {found}. {consequence}. {_ADVICE[worst]}", streak)

    def after_rollback(self, memory: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, and count one rollback more; the count itself is not restored.

        Args:
            memory: the values of `to_json` at that checkpoint.
        """
        rollbacks = self._rollbacks
        self.from_json(memory)
        self._rollbacks = rollbacks + 1

    def to_json(self) -> dict[str, Any]:
        """Return all that the next verdicts depend on, as plain values; floats survive JSON exactly."""
        return {
            "steps": [step for step, _ in self._losses],
            "losses": [loss for _, loss in self._losses],
            "level_since": self._level_since,
            "streaks": dict(self._streaks),
            "skips_in_row": self._skips_in_row,
            "rollbacks": self._rollbacks,
        }

    def from_json(self, memory: Mapping[str, Any]) -> None:
        """Restore the values of `to_json`. If their window is longer than this guard's, the newest losses are kept."""
        self._losses.clear()
        self._losses.extend(zip(memory["steps"], memory["losses"], strict=True))
        self._level_since = memory["level_since"]
        self._streaks = dict(memory["streaks"])
        self._skips_in_row = memory["skips_in_row"]
        self._rollbacks = memory["rollbacks"]

    def _broken_rules(self, step: int, loss: float, grad_norm: float) -> dict[GuardRule, str]:
        """Return the rules that a step breaks, with what was found. Rules of the loss come first: they win among equal actions."""
        config = self._config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return {"non_finite": f"loss {loss:.6g} and gradient norm {grad_norm:.6g} are not both finite"}
        broken: dict[GuardRule, str] = {}
        expected = self._expected(step)
        if loss > expected.high:
            broken["spike"] = f"loss {loss:.6g} is above {expected.high:.6g}, {expected.described}"
        if loss < expected.low:
            broken["drop"] = f"loss {loss:.6g} is below {expected.low:.6g}, {expected.described}"
        if grad_norm > config.max_grad_norm:
            broken["exploding"] = f"gradient norm {grad_norm:.6g} is above guard.max_grad_norm = {config.max_grad_norm:g}"
        if grad_norm < config.min_grad_norm:
            broken["vanishing"] = f"gradient norm {grad_norm:.6g} is below guard.min_grad_norm = {config.min_grad_norm:g}"
        return broken

    def _action(self, rule: GuardRule, loss: float) -> Action:
        action: Action = getattr(self._config, rule)
        return "skip" if rule == "non_finite" and self._scaled and math.isfinite(loss) else action

    def _expected(self, step: int) -> _LossRange:
        config, known = self._config, step - 2
        oldest = self._level_since + 1 if self._level_since <= known else 0
        losses = [loss for at, loss in self._losses if oldest <= at <= known][-config.loss_window :]
        if not losses:
            return _LossRange()
        level, lowest, num = median(losses), min(losses), len(losses)
        floor = config.spike_floor * max(1, _SURE_HISTORY / num) * max(abs(level), _LEAST_LEVEL)
        described = f"the limit after the last {num} loss{'es' * (num > 1)} (median {level:.6g}, lowest {lowest:.6g}"
        if num < _LEAST_HISTORY:
            return _LossRange(high=level + floor, described=f"{described})")
        noise = _DEVIATION_PER_DIFFERENCE * median(abs(after - before) for before, after in pairwise(losses))
        margin = max(config.spike_factor * noise, floor)
        newest = losses[-(num // _NEWEST_PART) :]
        climb = max(config.spike_factor * noise * _DEVIATION_OF_MEDIAN / math.sqrt(len(newest)), floor) / 2
        described = f"{described}, newest (median of {len(newest)}) {median(newest):.6g}, noise {noise:.3g})"
        diverges = median(newest) > level + climb
        return _LossRange(lowest - margin, level + (climb if diverges else margin), described)

    def _bounded(self, rule: GuardRule, action: Action) -> tuple[Action, str]:
        """Return the action, which is a stop if a bound is used up, and a sentence about its effect."""
        config = self._config
        if action == "rollback" and self._rollbacks >= config.max_rollbacks:
            return "stop", f"Training stops, because the guard.max_rollbacks = {config.max_rollbacks} rollbacks are used up"
        if action == "skip" and self._skips_in_row > config.max_skips:
            updates = f"guard.max_skips = {config.max_skips} updates in a row"
            return "stop", f"Training stops, because more than {updates} were withheld"
        consequences: dict[Action, str] = {
            "log": "The update was made",
            "skip": f"The update was withheld ({self._skips_in_row} in a row, of at most {config.max_skips})",
            "rollback": (
                f"The guard requests a rollback to a checkpoint before this step ({self._rollbacks + 1} of at most "
                f"{config.max_rollbacks}). It leaves out the rows of guard.window_steps = {config.window_steps} steps"
            ),
            "stop": f"Training stops, because guard.{rule} = stop",
        }
        return action, consequences[action]


_ADVICE: dict[GuardRule, str] = {
    "non_finite": "Look at the rows of this step, lower optim.lr, or use precision bf16 or fp32",
    "exploding": "If the norm stays high, lower optim.lr or raise schedule.warmup_steps; if it is usual, raise the limit",
    "vanishing": "Look for rows without targets, frozen weights or a constant loss; if precision is fp16, use bf16",
    "spike": "Look at the rows of this step; if the loss stays high or spikes come back, lower optim.lr or raise "
    "schedule.warmup_steps, or set guard.spike to skip or rollback",
    "drop": "Look at the rows of this step for text that repeats itself or has few targets",
}
