"""`train`: one rank of a training, or the whole of it."""

from __future__ import annotations

import os

from common.errors import ExitCode, StorageError
from trainer.config import TrainConfig
from trainer.loop import train
from trainer.watchdog.processes import leave_reason

__all__ = ["run"]


def run(config: TrainConfig) -> None:
    """Trains and prints the digest of the weights, once for all ranks.

    Raises:
        ProjectError: see `train`.
        StorageError: the reader of the log has closed it, so the training is not done.
    """
    try:
        result = train(config)
    except BrokenPipeError as error:
        raise StorageError("the reader of the log has closed it; run the same command again to go on") from error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        leave_reason(f"{ExitCode.DONE:d}")  # whatever becomes of torchrun now
    if os.environ.get("RANK", "0") == "0":
        print(result)
