"""The settings of a training run that have no effect on this machine and with this extension."""

from __future__ import annotations

from common.settings.model import needed_text, unmet_conditions
from trainer.config.train import TrainConfig


def settings_without_effect(
    config: TrainConfig, *, device: str, num_ranks: int, watched: bool, custom_loss: bool, own_model: bool
) -> list[str]:
    """Return a warning for each setting that differs from its default and has no effect. `watched`: whether the watchdog runs."""
    found = (device, custom_loss, own_model, "several" if num_ranks > 1 else "one", "on" if watched else "off")
    unmet = unmet_conditions(config, dict(zip(config.facts, found, strict=True)))
    return [needed_text(name, conditions) for name, conditions in unmet.items()]
