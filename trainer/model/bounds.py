"""Limits of this machine for the size of a model. The settings may come from a file of a run, which may be untrusted."""

from __future__ import annotations

from collections.abc import Callable

from common.errors import CheckpointError
from common.host_memory import check_fits_memory, free_host_bytes
from trainer.config import LoraConfig, ModelConfig
from trainer.model.decoder import num_weights
from trainer.model.layers import DecoderLayer
from trainer.model.lora import num_adapter_weights

_NO_ADAPTERS = LoraConfig()
_WEIGHT_BYTES = 4
_MOST_ROWS = 65536
_SHARE_OF_ROWS = 0.5  # share of the free memory for the rows of one forward pass


def most_rows(model: ModelConfig, row_length: int) -> int:
    """Rows of one forward pass of a decoder, without gradients, for which this machine has the memory; at least 1."""
    row_bytes = _WEIGHT_BYTES * row_length * DecoderLayer.num_live(model)
    return max(1, int(min(_SHARE_OF_ROWS * free_host_bytes() / row_bytes, _MOST_ROWS)))


def check_model_size(
    model: ModelConfig,
    vocab_size: int,
    saved: int | None = None,
    counted: Callable[[ModelConfig, int], int] = num_weights,
    lora: LoraConfig = _NO_ADAPTERS,
) -> None:
    """Reject a model that cannot be built here, before memory is allocated. `saved` is the number of weights in its checkpoint."""
    needed = counted(model, vocab_size) + num_adapter_weights(model, lora)
    if saved is not None and needed != saved:
        raise CheckpointError(
            f"the settings describe a model of {needed} weights, and the checkpoint has {saved}; continue with the settings that "
            "wrote it, or start a new run"
        )
    check_fits_memory(needed)
