"""What the numbers of each step say about a run: all is well, worth a line in the log, or a reason to skip, roll back or stop.

Nothing here touches a device or a file. All ranks judge the same numbers, so they come to the same verdict without a word.

The loss is held against the last healthy ones. Their level is the median. Their noise is taken from the median difference of
neighbours, which a falling loss hardly widens: the successive differences of von Neumann, Kent, Bellinson and Hart (1941), with
a median (Hampel, 1974) in place of the mean. A spike is measured from the level, a drop from the lowest of them, because the
median of a falling loss lags behind it.
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

__all__ = ["Guard", "Reason", "Thresholds", "Verdict"]

Reason = Literal["non_finite", "exploding", "vanishing", "spike", "drop"]
"""Also the name of the setting that says what to do then."""

_SEVERITY: dict[Action, int] = {"log": 0, "skip": 1, "rollback": 2, "stop": 3}
_LEAST_HISTORY = 8
"""Fewer losses than these make no median worth trusting: until then only the norms and finiteness are judged."""
_LEAST_LEVEL = 0.01
"""In nats. Below it a loss is as good as zero, and its changes are no news, however large beside it."""
_DEVIATION_PER_DIFFERENCE = 1 / (0.674490 * math.sqrt(2))
"""Standard deviation over the median absolute difference of two draws, for normal noise."""


@dataclass(frozen=True)
class Verdict:
    """What to do about a step."""

    action: Literal["none", "log", "skip", "rollback", "stop"] = "none"
    """skip: the update was withheld by the step itself, see `Thresholds`."""
    reason: Reason | None = None
    """What led to the action; None where all is well."""
    message: str = ""
    """What was found, what follows and what to do, for the user; empty where all is well."""
    streak: int = 0
    """Steps in a row that had this reason, this one included."""

    @property
    def is_news(self) -> bool:
        """Whether a log should show it: a reason that lasts is worth a line at its 1st, 2nd, 4th, 8th … step, a stop always."""
        return self.action in ("rollback", "stop") or (self.streak > 0 and self.streak & (self.streak - 1) == 0)


@dataclass(frozen=True)
class Thresholds:
    """When a step withholds its own update: where a number is not finite, or beyond one of these."""

    skip_norm_above: float = math.inf
    skip_norm_below: float = -math.inf
    skip_loss_above: float = math.inf
    skip_loss_below: float = -math.inf

    def skips(self, loss: float, grad_norm: float) -> bool:
        """Whether the update is withheld; the device computes the same in fp64 from the same two numbers."""
        healthy = self.skip_norm_below <= grad_norm <= self.skip_norm_above and self.skip_loss_below <= loss <= self.skip_loss_above
        return not (healthy and math.isfinite(loss) and math.isfinite(grad_norm))


@dataclass(frozen=True)
class _LossRange:
    """The losses that the last healthy ones let expect."""

    low: float = -math.inf
    high: float = math.inf
    described: str = ""


@dataclass(frozen=True)
class _Anomaly:
    reason: Reason
    action: Action
    found: str


class Guard:
    """Judges each step by the healthy ones before it.

    Args:
        config: the settings.
        scaled: gradients are scaled (precision fp16). A gradient that is not finite under a finite loss then belongs to the search
            for the scale, and is skipped whatever `config.non_finite` says; `config.max_skips` bounds it too.
    """

    def __init__(self, config: GuardConfig, *, scaled: bool = False) -> None:
        self._config = config
        self._scaled = scaled
        self._losses: deque[tuple[int, float]] = deque(maxlen=config.loss_window + 1)  # one more, which may be too new to be used
        self._level_since = 0
        """Step up to which losses belong to a level that is past, once that step itself is old enough to be known."""
        self._streaks: dict[str, int] = {}
        self._skips_in_row = 0
        self._rollbacks = 0

    @property
    def rollbacks(self) -> int:
        """Rollbacks of the run so far."""
        return self._rollbacks

    @property
    def lr_factor(self) -> float:
        """What the learning rate is multiplied by since the last rollback."""
        return self._config.rollback_lr_factor**self._rollbacks

    def thresholds(self, step: int) -> Thresholds:
        """The limits for `step`, which is about to start; infinite wherever the action is not skip.

        They use the losses up to `step - 2` only, as `judge` does: a host that reads results one step late knows no more.
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
        """The verdict on a step; steps come in order, each once.

        Args:
            step: its number.
            loss: of the global batch, in nats.
            grad_norm: global norm of the gradient, before clipping.
        """
        anomalies = self._anomalies(step, loss, grad_norm)
        self._streaks = {anomaly.reason: self._streaks.get(anomaly.reason, 0) + 1 for anomaly in anomalies}
        skipped = any(anomaly.action == "skip" for anomaly in anomalies)
        self._skips_in_row = self._skips_in_row + 1 if skipped else 0
        if not skipped and not self._streaks.keys() & {"non_finite", "spike", "drop"}:
            self._losses.append((step, loss))
        if not anomalies:
            return Verdict()
        worst = max(anomalies, key=lambda anomaly: _SEVERITY[anomaly.action])
        action, consequence = self._bounded(worst)
        if action == "log" and self._config.loss_window in (self._streaks.get("spike"), self._streaks.get("drop")):
            self._level_since = step
            consequence = f"It has lasted for guard.loss_window = {self._config.loss_window} steps and counts as normal from now on"
        streak = self._streaks[worst.reason]
        found = "; ".join(anomaly.found for anomaly in anomalies) + (f" ({streak} steps in a row)" if streak > 1 else "")
        return Verdict(action, worst.reason, f"step {step}: {found}. {consequence}. {_ADVICE[worst.reason]}", streak)

    def after_rollback(self, memory: Mapping[str, Any]) -> None:
        """Goes back to what was known at a checkpoint, and counts one rollback more than before, which a checkpoint cannot undo.

        Args:
            memory: what `to_json` gave for that checkpoint.
        """
        rollbacks = self._rollbacks
        self.from_json(memory)
        self._rollbacks = rollbacks + 1

    def to_json(self) -> dict[str, Any]:
        """All that the next verdicts depend on, as plain values; floats survive JSON exactly."""
        return {
            "steps": [step for step, _ in self._losses],
            "losses": [loss for _, loss in self._losses],
            "level_since": self._level_since,
            "streaks": dict(self._streaks),
            "skips_in_row": self._skips_in_row,
            "rollbacks": self._rollbacks,
        }

    def from_json(self, memory: Mapping[str, Any]) -> None:
        """Goes on from what `to_json` gave; of a longer window than this guard's the newest losses are kept."""
        self._losses.clear()
        self._losses.extend(zip(memory["steps"], memory["losses"], strict=True))
        self._level_since = memory["level_since"]
        self._streaks = dict(memory["streaks"])
        self._skips_in_row = memory["skips_in_row"]
        self._rollbacks = memory["rollbacks"]

    def _anomalies(self, step: int, loss: float, grad_norm: float) -> list[_Anomaly]:
        """All that is wrong with a step; a loss comes before a norm, so that it is the reason among equal actions."""
        config = self._config
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            action = "skip" if self._scaled and math.isfinite(loss) else config.non_finite
            return [_Anomaly("non_finite", action, f"loss {loss:.6g} and gradient norm {grad_norm:.6g} are not both finite")]
        found = []
        expected = self._expected(step)
        if loss > expected.high:
            found.append(_Anomaly("spike", config.spike, f"loss {loss:.6g} is above {expected.high:.6g}, {expected.described}"))
        if loss < expected.low:
            found.append(_Anomaly("drop", config.drop, f"loss {loss:.6g} is below {expected.low:.6g}, {expected.described}"))
        if grad_norm > config.max_grad_norm:
            limit = f"above guard.max_grad_norm = {config.max_grad_norm:g}"
            found.append(_Anomaly("exploding", config.exploding, f"gradient norm {grad_norm:.6g} is {limit}"))
        if grad_norm < config.min_grad_norm:
            limit = f"below guard.min_grad_norm = {config.min_grad_norm:g}"
            found.append(_Anomaly("vanishing", config.vanishing, f"gradient norm {grad_norm:.6g} is {limit}"))
        return found

    def _expected(self, step: int) -> _LossRange:
        config, known = self._config, step - 2
        oldest = self._level_since + 1 if self._level_since <= known else 0
        losses = [loss for at, loss in self._losses if oldest <= at <= known][-config.loss_window :]
        if len(losses) < _LEAST_HISTORY:
            return _LossRange()
        level, lowest = median(losses), min(losses)
        noise = _DEVIATION_PER_DIFFERENCE * median(abs(after - before) for before, after in pairwise(losses))
        margin = max(config.spike_factor * noise, config.spike_floor * max(abs(level), _LEAST_LEVEL))
        described = f"the limit after the last {len(losses)} losses (median {level:.6g}, lowest {lowest:.6g}, noise {noise:.3g})"
        return _LossRange(lowest - margin, level + margin, described)

    def _bounded(self, worst: _Anomaly) -> tuple[Action, str]:
        """The action, which is a stop where a bound is used up, and what it comes to."""
        config = self._config
        if worst.action == "rollback" and self._rollbacks >= config.max_rollbacks:
            return "stop", f"Training stops, as guard.max_rollbacks = {config.max_rollbacks} are used up"
        if worst.action == "skip" and self._skips_in_row > config.max_skips:
            return "stop", f"Training stops, as more than guard.max_skips = {config.max_skips} updates in a row were withheld"
        consequences: dict[Action, str] = {
            "log": "The update was made",
            "skip": f"The update was withheld ({self._skips_in_row} in a row, of at most {config.max_skips})",
            "rollback": (
                "Training goes back to a checkpoint from before this step and leaves out the rows of guard.window_steps = "
                f"{config.window_steps} steps (rollback {self._rollbacks + 1} of at most {config.max_rollbacks})"
            ),
            "stop": f"Training stops, as guard.{worst.reason} = stop",
        }
        return worst.action, consequences[worst.action]


_ADVICE: dict[Reason, str] = {
    "non_finite": "Look at the rows of this step, lower optim.lr, or use precision bf16 or fp32",
    "exploding": "If it lasts, lower optim.lr or lengthen schedule.warmup_steps; if it is usual here, raise guard.max_grad_norm",
    "vanishing": "Look for rows without targets, frozen weights or a loss that is constant; with precision fp16, use bf16",
    "spike": "Look at the rows of this step; if spikes come back, lower optim.lr, or set guard.spike to skip or rollback",
    "drop": "Look at the rows of this step for text that repeats itself or has few targets",
}
