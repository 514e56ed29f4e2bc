"""`train`: runs one rank of a training, or the whole training if it has one rank."""

from __future__ import annotations

import logging
import os
import sys

from common.errors import ExitCode, StorageError
from trainer.config import TrainConfig
from trainer.watchdog.processes import write_exit_code

_log = logging.getLogger(__name__)


def run(config: TrainConfig) -> None:
    """Trains a model on prepared data. Under torchrun, every rank runs this command."""
    from trainer.launch.finished import report_finished

    if report_finished(config):  # before torch is loaded
        return
    from trainer.loop import train

    try:
        result = train(config)
    except BrokenPipeError as error:
        raise StorageError("the reader of the log has closed it; run the same command again to continue") from error
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_exit_code(f"{ExitCode.DONE:d}")  # the launcher then knows the result even if torchrun fails
    if os.environ.get("RANK", "0") == "0":
        from trainer.report.summary import summary_lines

        try:
            print("\n".join(summary_lines(config.run)), file=sys.stderr)
        except Exception as error:  # the training has succeeded
            _log.warning("cannot read the results of %s back (%s: %s)", config.run, type(error).__name__, error)
        print(result)
