from __future__ import annotations

from trainer.config import TrainConfig
from trainer.run.record import _SETTINGS_THAT_CHANGE_BITS

RESOLVED = {"data", "attention", "extension", "threads", "device"}
"""The identity holds what these settings lead to (a digest, a kernel, a number), not the settings."""
WITHOUT_EFFECT_ON_BITS = {
    "recipe",
    "run",
    "verify_data",
    "prefetch",
    "limits",
    "eval",
    "checkpoint",
    "log",
    "alerts",
    "watchdog",
    "bad_data",
    "resume",
    "branch",
}
"""The end of the learning rate, which `limits` decides, is in the identity as `schedule.decay_steps`."""


def test_each_setting_is_in_the_identity_or_is_known_to_change_no_bit() -> None:
    assert set(_SETTINGS_THAT_CHANGE_BITS) | RESOLVED | WITHOUT_EFFECT_ON_BITS == set(TrainConfig.model_fields)
    assert not set(_SETTINGS_THAT_CHANGE_BITS) & (RESOLVED | WITHOUT_EFFECT_ON_BITS)
