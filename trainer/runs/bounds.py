"""Limits of this machine for numbers that come from a file of a run. The file may be untrusted.

A run that was trained on a larger machine may be read on a smaller one, so the limits are several times the useful values. They
prevent that a record with a million ranks makes the machine unusable.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

from common.errors import CheckpointError, ConfigError
from common.hardware import num_cores
from common.host_memory import available_host_bytes
from common.text import format_bytes
from trainer.config import LoraConfig, ModelConfig
from trainer.model.decoder import num_weights
from trainer.model.layers import DecoderLayer
from trainer.model.lora import num_adapter_weights

__all__ = ["check_fits_memory", "check_model_size", "check_ranks", "most_ranks", "most_rows", "most_threads"]

_NO_ADAPTERS = LoraConfig()
_RANKS_PER_CORE = 4
_THREADS_PER_CORE = 16
_RANK_BYTES = 256 << 20
"""Least memory of a process that has loaded torch."""
_WEIGHT_BYTES = 4
_MOST_ROWS = 65536
_SHARE_OF_ROWS = 0.5
"""Share of the free memory for the rows of one forward pass."""

_ELSEWHERE = "replay the run on a machine like the one that it was trained on"


def most_threads() -> int:
    return _THREADS_PER_CORE * num_cores()


def most_ranks(device: str) -> int:
    """Return how many ranks this machine can run.

    Args:
        device: `auto`, `cpu` or `cuda`; each rank on `cuda` needs a GPU.
    """
    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, int(min(_RANKS_PER_CORE * num_cores(), _free_bytes() // _RANK_BYTES)))


def most_rows(model: ModelConfig, row_length: int) -> int:
    """Rows of one forward pass of a decoder, without gradients, for which this machine has the memory; at least 1."""
    row_bytes = _WEIGHT_BYTES * row_length * DecoderLayer.num_live(model)
    return max(1, int(min(_SHARE_OF_ROWS * _free_bytes() / row_bytes, _MOST_ROWS)))


def check_ranks(recorded: int, threads: int, device: str) -> int:
    """Return the recorded number of ranks, if this machine can run them with `threads` threads each.

    Raises:
        ConfigError: there are too many ranks or threads.
    """
    if recorded > (most := most_ranks(device)):
        raise ConfigError(f"the record names {recorded} ranks, and this machine can run {most} at most; {_ELSEWHERE}")
    if recorded * threads > (most := most_threads()):
        ranks = f"{recorded} rank{'s' * (recorded > 1)} of {threads} threads"
        raise ConfigError(f"the record names {ranks}, and this machine can run {most} threads at most; {_ELSEWHERE}")
    return recorded


def check_model_size(
    model: ModelConfig,
    vocab_size: int,
    saved: int | None = None,
    counted: Callable[[ModelConfig, int], int] = num_weights,
    lora: LoraConfig = _NO_ADAPTERS,
) -> None:
    """Reject a model that cannot be built here, before memory is allocated for it.

    Args:
        model: its shape.
        vocab_size: number of pieces of the tokenizer.
        saved: number of weights in a checkpoint of the model, if there is one.
        counted: returns the number of weights of the model without adapters.
        lora: settings of its adapters.

    Raises:
        CheckpointError: the checkpoint has another number of weights.
        ConfigError: the weights alone are larger than the free memory.
    """
    needed = counted(model, vocab_size) + num_adapter_weights(model, lora)
    if saved is not None and needed != saved:
        raise CheckpointError(
            f"the settings describe a model of {needed} weights, and the checkpoint has {saved}; continue with the settings that "
            "wrote it, or start a new run"
        )
    check_fits_memory(needed)


def check_fits_memory(num_weights: int) -> None:
    """Raise ConfigError if the weights of a model, in fp32, are larger than the free memory."""
    if num_weights * _WEIGHT_BYTES > (free := _free_bytes()):
        raise ConfigError(
            f"the model has {num_weights} weights, which take {format_bytes(num_weights * _WEIGHT_BYTES)}, and "
            f"{format_bytes(int(free))} of memory are free; use a smaller model or a machine with more memory"
        )


def _free_bytes() -> float:
    """Return the free memory of the host in bytes; infinite if the platform is not Linux."""
    return available_host_bytes() if sys.platform == "linux" else math.inf
