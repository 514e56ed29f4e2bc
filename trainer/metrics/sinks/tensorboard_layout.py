"""The arrangement of the curves in TensorBoard, and the settings by which runs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.settings.dotted import flatten
from common.settings.markers import Effect, Marker
from common.settings.model import is_among, settings_with
from trainer.config import TrainConfig

__all__ = ["LAYOUT", "SHOWN_FIRST", "hyper_parameters"]

LAYOUT: dict[str, dict[str, list[Any]]] = {
    "Loss": {
        "training, its mean over log.average_steps steps, validation": [
            "Multiline",
            ["train/loss$", "train/loss_average$", "validation/loss$"],
        ],
        "gap: validation less training": ["Multiline", ["validation/gap$"]],
        "trend of the validation loss, per 1,000 steps": ["Multiline", ["validation/trend_per_1000_steps$"]],
        "perplexity": ["Multiline", ["train/perplexity$", "validation/perplexity$"]],
        "perplexity by source": ["Multiline", ["validation_source/.*"]],
    },
    "Optimisation": {
        "learning rate": ["Multiline", ["train/learning_rate$", "train/learning_rate_muon$"]],
        "gradient norm": ["Multiline", ["train/gradient_norm$"]],
        "gradient norm by layer": ["Multiline", ["gradient_norm/.*"]],
        "update over weight by layer": ["Multiline", ["update_ratio/.*"]],
        "weight norm by layer": ["Multiline", ["weight_norm/.*"]],
    },
    "Speed": {
        "tokens per second": ["Multiline", ["speed/tokens_per_s$"]],
        "share of the peak rate (MFU)": ["Multiline", ["speed/mfu$"]],
        "share of the time: waiting for data, monitoring": ["Multiline", ["speed/loader_wait_share$", "speed/monitor_share$"]],
        "stall of a checkpoint, s": ["Multiline", ["speed/save_stall_s$"]],
    },
    "Hardware": {
        "GPU utilisation": ["Multiline", ["gpu_.*/utilisation$"]],
        "GPU memory, MiB": ["Multiline", ["gpu_.*/memory_used_mib$"]],
        "GPU temperature, °C": ["Multiline", ["gpu_.*/temperature_c$"]],
        "GPU power, W": ["Multiline", ["gpu_.*/power_w$"]],
        "GPU clock, MHz": ["Multiline", ["gpu_.*/sm_clock_mhz$"]],
        "host memory, MiB": ["Multiline", ["host/private_mib$", "host/rss_mib$"]],
        "processors": ["Multiline", ["host/cpu$"]],
        "free disk, GB": ["Multiline", ["host/disk_free_gb$"]],
    },
    "Health": {
        "steps that were not finite": ["Multiline", ["health/non_finite_steps$"]],
        "alerts": ["Multiline", ["health/alerts_.*"]],
        "growth of host memory, MB per 1,000 steps": ["Multiline", ["host/memory_growth_mb_per_1000_steps$"]],
        "growth of GPU memory, MB per 1,000 steps": ["Multiline", ["gpu_.*/memory_growth_mb_per_1000_steps$"]],
        "throttled": ["Multiline", ["gpu_.*/throttled$"]],
        "ECC errors": ["Multiline", ["gpu_.*/ecc_.*"]],
    },
}
"""Categories of the custom scalars tab; tags are regular expressions."""

SHOWN_FIRST = {"train/loss": "Loss/train", "validation/loss": "Loss/validation"}
"""Curves with a second tag. TensorBoard shows groups of tags in the order of their names, upper case first."""


def hyper_parameters(settings: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the settings that affect the result, flat, as numbers and texts."""
    left_out = settings_with(TrainConfig, Effect.NONE, Marker.FOLDER)
    flat: dict[str, str | float] = {}
    for name, value in flatten(settings).items():
        if not is_among(name, left_out):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            flat[name] = value if is_number else "none" if value is None else str(value)
    return flat
