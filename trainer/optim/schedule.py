"""Learning rate and weight decay as pure functions of the step."""

from __future__ import annotations

import math
from bisect import bisect_right

from trainer.config import ScheduleConfig


def learning_rate_factor(config: ScheduleConfig, decay_steps: int, step: int, start: float | None = None) -> float:
    """Return the learning rate of the update from `step` to `step + 1`, as a share of the peak, in [0, 1].

    Every kind begins with a linear warm-up of W = `warmup_steps` steps (Goyal et al., 2017): (step + 1) / (W + 1). The first update
    has a rate above 0, and step W has the peak, 1. From step W, with D = `decay_steps`, p = (step - W) / (D - W) and the floor f:

        constant      1
        cosine        f + (1 - f) (1 + cos(pi p)) / 2      Loshchilov and Hutter (2017)
        linear        f + (1 - f) (1 - p)                  Devlin et al. (2019), to 0
        polynomial    f + (1 - f) (1 - p)^power            Chen et al. (2017), to 0
        exponential   f^p                                  decreases by the same share in each step
        wsd           1 up to step S, then f + (1 - f) (1 - q), q = (step - S) / (D - S)
                                                           Hu et al. (2024); linear as in Hägele et al. (2024)
                      with `cooldown_shape` = sqrt: f + (1 - f) (1 - sqrt(q))
                                                           Hägele et al. (2024), section 3
        step          max(f, gamma^m), m = number of milestones up to `step`
                                                           He et al. (2016)

    S is `start`, by default `cooldown_start`. From step D all kinds except constant and step stay at f, also if the warm-up is
    longer than D. With D = 0 the kind wsd has no end yet and stays at 1.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    if config.kind == "step":
        return max(config.min_lr_ratio, config.gamma ** bisect_right(config.milestones, step))
    if config.kind != "wsd":
        start = config.warmup_steps
    elif start is None:
        start = cooldown_start(config, decay_steps)
    progress = 0.0 if decay_steps == 0 else 1.0
    if step < decay_steps:
        progress = max(0.0, (step - start) / (decay_steps - start))
    if config.kind == "exponential":
        return float(config.min_lr_ratio**progress)
    if config.kind == "cosine":
        shape = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.kind == "wsd" and config.cooldown_shape == "sqrt":
        shape = 1 - math.sqrt(progress)
    else:
        shape = float((1 - progress) ** (config.power if config.kind == "polynomial" else 1.0))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def cooldown_start(config: ScheduleConfig, decay_steps: int) -> int:
    """Return the steps before the rate of `wsd` falls. A cool-down has at least two steps: the first is still at the peak."""
    length = config.cooldown_steps or max(2, round(config.decay_share * decay_steps))
    return max(config.warmup_steps, decay_steps - length)


def weight_decay_factor(config: ScheduleConfig, decay_steps: int, step: int, rate_factor: float) -> float:
    """Return the weight decay of the update from `step` to `step + 1`, as a share of `optim.weight_decay`.

    The optimizers multiply it by the learning rate. So with `constant` a step shrinks the weights in proportion to its learning
    rate (Loshchilov and Hutter, 2019), and with `lr` in proportion to the square of it (Defazio, 2025, "Why gradients rapidly
    increase near the end of training"). `linear` is 1 - step / D, at least 0 (nanochat).
    """
    if config.weight_decay == "constant":
        return 1.0
    return rate_factor if config.weight_decay == "lr" else max(0.0, 1 - step / decay_steps)
