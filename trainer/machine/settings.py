"""The settings with which this machine can use a run that another machine has trained."""

from __future__ import annotations

import torch

from common.hardware import num_cores
from trainer.config import TrainConfig
from trainer.distributed.devices import check_no_gpu_is_hidden


def settings_here(config: TrainConfig) -> TrainConfig:
    """Return the settings with which this machine can use a run: at most one thread per core; without a GPU, a CPU's attention.

    The precision stays, because CPUs compute in all precisions; a float8 run is used in bf16 on any machine.
    """
    cores = num_cores()
    if config.threads is not None and config.threads > cores:
        config = config.model_copy(update={"threads": cores})
    if torch.cuda.is_available():
        return config
    if config.device != "cpu":
        check_no_gpu_is_hidden()
    attention = "auto" if config.attention in ("varlen", "flex") else config.attention
    return config.model_copy(update={"device": "cpu", "attention": attention})
