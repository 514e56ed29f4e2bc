"""`train`: runs one rank of a training, or the whole training if it has one rank."""

from __future__ import annotations

import os

from common.errors import ExitCode, StorageError
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.watchdog.processes import leave_reason

__all__ = ["run"]


def run(config: TrainConfig) -> None:
    """Train, and print the digest of the weights on rank 0.

    Raises:
        ProjectError: see `train`.
        StorageError: the reader of the log has closed it, so the training stopped early.
    """
    try:
        result = train(config)
    except BrokenPipeError as error:
        raise StorageError("the reader of the log has closed it; run the same command again to continue") from error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        leave_reason(f"{ExitCode.DONE:d}")  # the launcher then knows the result even if torchrun fails
    if os.environ.get("RANK", "0") == "0":
        print(result)
