"""Alerts and the rules that raise them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainer.config import GuardConfig
from trainer.health.guard import GuardRule, Verdict
from trainer.runs.events import AlertEvent

__all__ = ["Alert", "Rule", "Severity", "guard_alert"]

Severity = Literal["warning", "critical"]
Rule = Literal[
    GuardRule,
    "loader_wait",
    "throughput",
    "slow_rank",
    "throttling",
    "ecc",
    "xid",
    "gpu_lost",
    "host_memory",
    "gpu_memory",
    "gpu_utilisation",
    "disk",
    "plateau",
    "overfitting",
    "out_of_memory",
    "quarantine",
    "failed",
]
"""`plateau` and `overfitting` belong to evaluations, `out_of_memory` and `quarantine` to adjustments of a run, and `failed` to an
error that ends it."""


@dataclass(frozen=True)
class Alert(AlertEvent):
    """A message that a broken rule raises; a person, or the run itself, should act on it."""

    rule: Rule
    severity: Severity
    count: int = 0
    """How many alerts of its rule the run has had, with this one; not in the file. The monitor sets it."""


def guard_alert(verdict: Verdict, step: int, loss: float, grad_norm: float, config: GuardConfig) -> Alert:
    """Return the alert for the guard's verdict on a step that breaks a rule."""
    assert verdict.rule is not None
    limits: dict[GuardRule, float | None] = {"exploding": config.max_grad_norm, "vanishing": config.min_grad_norm}
    of_gradient = verdict.rule in limits or (verdict.rule == "non_finite" and math.isfinite(loss))
    severity: Severity = "critical" if verdict.action in ("rollback", "stop") else "warning"
    value = grad_norm if of_gradient else loss
    return Alert(verdict.rule, step, severity, verdict.message, verdict.action, value, limits.get(verdict.rule))
