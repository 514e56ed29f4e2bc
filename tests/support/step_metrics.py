"""Metrics of a training step for tests of sinks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.metrics.sinks.base import StepMetrics


def step_metrics(number: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    """Return the metrics of a step with this number, with fields replaced by `changes`."""
    plain = StepMetrics(
        step=number,
        last_step=100,
        loss=loss,
        grad_norm=0.5,
        learning_rate=1e-3,
        targets=number * 10,
        tokens_per_s=1000.0,
        mfu=None,
        loader_wait_s=0.001,
    )
    return replace(plain, **changes)
