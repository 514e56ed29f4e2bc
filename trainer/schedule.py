"""Learning rate over the steps, as pure functions of the step."""

from __future__ import annotations

import math

from trainer.config import ScheduleConfig

__all__ = ["learning_rate_factor"]


def learning_rate_factor(config: ScheduleConfig, decay_steps: int, step: int) -> float:
    """The share of the peak learning rate that the update from `step` to `step + 1` uses, in (0, 1].

    Linear warm-up reaches 1 at step `warmup_steps`; then the factor falls to `floor` at `decay_steps`, as half a cosine
    (Loshchilov and Hutter, 2017) or a straight line, and stays there. The first update is at 1/(warmup_steps + 1), not at
    0, where it would do nothing.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    if step >= decay_steps:
        return config.floor
    progress = (step - config.warmup_steps) / (decay_steps - config.warmup_steps)
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.kind == "cosine" else 1 - progress
    return config.floor + (1 - config.floor) * shape
