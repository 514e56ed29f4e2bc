"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from bisect import bisect_right

from trainer.config import ScheduleConfig

__all__ = ["learning_rate_factor"]


def learning_rate_factor(config: ScheduleConfig, decay_steps: int, step: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1`, as a share of the peak, in [0, 1].

    Every kind begins with a linear warm-up of W = `warmup_steps` steps (Goyal et al., 2017): (step + 1) / (W + 1). The first update
    has a rate above 0, and step W has the peak, 1. From step W, with D = `decay_steps`, p = (step - W) / (D - W) and the floor f:

        constant      1
        cosine        f + (1 - f) (1 + cos(pi p)) / 2      Loshchilov and Hutter (2017)
        linear        f + (1 - f) (1 - p)                  Devlin et al. (2019), to 0
        polynomial    f + (1 - f) (1 - p)^power            Chen et al. (2017), to 0
        exponential   f^p                                  decreases by the same share in each step
        wsd           1 up to step S, then f + (1 - f) (1 - (step - S) / (D - S))
                                                           Hu et al. (2024); linear as in Hägele et al. (2024)
        step          max(f, gamma^m), m = number of milestones up to `step`
                                                           He et al. (2016)

    S is `decay_share` times D before D, rounded to whole steps, but not before W. From step D all kinds except constant and step
    stay at f, also if the warm-up is longer than D. The kinds constant and step do not depend on D.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    if config.kind == "step":
        return max(config.floor, config.gamma ** bisect_right(config.milestones, step))
    progress = _progress(config, decay_steps, step)
    if config.kind == "exponential":
        return float(config.floor**progress)
    return config.floor + (1 - config.floor) * _shape(config, progress)


def _progress(config: ScheduleConfig, decay_steps: int, step: int) -> float:
    """Return the progress of the decay at a step after the warm-up, 0 to 1."""
    if step >= decay_steps:
        return 1.0
    start = config.warmup_steps
    if config.kind == "wsd":
        start = max(start, decay_steps - max(1, round(config.decay_share * decay_steps)))
    return max(0.0, (step - start) / (decay_steps - start))


def _shape(config: ScheduleConfig, progress: float) -> float:
    """Return the decay from 1 to 0 as `progress` goes from 0 to 1."""
    if config.kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return float((1 - progress) ** (config.power if config.kind == "polynomial" else 1.0))
