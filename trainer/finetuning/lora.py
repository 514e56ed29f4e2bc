"""The conditions for training adapters in the ordinary loop. `trainer.model.lora` has the adapters."""

from __future__ import annotations

from common.errors import ConfigError
from trainer.config import TrainConfig

__all__ = ["check_lora"]


def check_lora(config: TrainConfig) -> None:
    """Refuse adapters in a new run that begins with new weights: they would be trained on matrices that stay random.

    Raises:
        ConfigError: `lora.rank` is set, and no other run gives the weights.
    """
    if config.lora.rank is not None and config.init is None:
        raise ConfigError(
            f"lora.rank = {config.lora.rank} trains adapters and not the model, so the model must be trained already, and init is "
            "not set; name the run with the trained model (--init RUN), or leave out lora.rank to train all weights"
        )
