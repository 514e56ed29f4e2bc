from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer.config import GuardConfig, TrainConfig
from trainer.machine.environment import flattened
from trainer.run.record import _SETTINGS_THAT_CHANGE_BITS, check_identity

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
}
"""The end of the learning rate, which `limits` decides, is in the identity as `schedule.decay_steps`."""


def test_each_setting_is_in_the_identity_or_is_known_to_change_no_bit() -> None:
    assert set(_SETTINGS_THAT_CHANGE_BITS) | RESOLVED | WITHOUT_EFFECT_ON_BITS == set(TrainConfig.model_fields)
    assert not set(_SETTINGS_THAT_CHANGE_BITS) & (RESOLVED | WITHOUT_EFFECT_ON_BITS)


@pytest.mark.parametrize("name", ["spike_factor", "spike_floor"])
def test_limits_of_the_loss_may_differ_at_a_resume_while_spikes_are_only_logged(name: str) -> None:
    def identity(**changes: object) -> dict[str, object]:
        return flattened({"guard": GuardConfig.model_validate(changes).model_dump()})

    check_identity(Path("run"), identity(), identity(**{name: 0.5}), ())
    for recorded, now in (({"spike": "skip"}, {"spike": "skip"}), ({"drop": "stop"}, {"drop": "stop"})):
        with pytest.raises(ConfigError, match=rf"guard\.{name} was"):
            check_identity(Path("run"), identity(**recorded), identity(**now, **{name: 0.5}), ())
