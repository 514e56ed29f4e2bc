"""Alerts and the rules that raise them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from trainer.config import GuardConfig
from trainer.health.guard import Reason, Verdict
from trainer.run.events import AlertEvent

__all__ = ["RULES", "Alert", "Rule", "Severity", "guard_alert"]

Severity = Literal["warning", "critical"]
Rule = Literal[
    "non_finite",
    "exploding",
    "vanishing",
    "spike",
    "drop",
    "loader_wait",
    "throughput",
    "slow_rank",
    "throttling",
    "ecc",
    "xid",
    "gpu_lost",
    "host_memory",
    "disk",
    "plateau",
    "overfitting",
    "out_of_memory",
    "quarantine",
    "failed",
]
"""The first five come from the guard, `plateau` and `overfitting` from the evaluations, `out_of_memory` and `quarantine` from the
changes of a run, and `failed` from an error that ends it."""
RULES: tuple[Rule, ...] = get_args(Rule)
_HARMFUL = {"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"}
"""Reasons that are a fault of cooling or supply. A GPU at its power cap does what it was built for."""


@dataclass(frozen=True)
class Alert(AlertEvent):
    """A message that a broken rule raises; a person, or the run itself, should act on it."""

    rule: Rule
    severity: Severity
    count: int = 0
    """How many alerts of its rule the run has had, with this one; not in the file. The monitor sets it."""


def guard_alert(verdict: Verdict, step: int, loss: float, grad_norm: float, config: GuardConfig) -> Alert:
    """The guard's verdict on a step, which must not be that all is well, as an alert."""
    assert verdict.reason is not None
    limits: dict[Reason, float | None] = {"exploding": config.max_grad_norm, "vanishing": config.min_grad_norm}
    of_gradient = verdict.reason in limits or (verdict.reason == "non_finite" and math.isfinite(loss))
    severity: Severity = "critical" if verdict.action in ("rollback", "stop") else "warning"
    value = grad_norm if of_gradient else loss
    return Alert(verdict.reason, step, severity, verdict.message, verdict.action, value, limits.get(verdict.reason))
