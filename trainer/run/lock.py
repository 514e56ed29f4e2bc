"""One writer at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError
from common.files import (
    sync_upwards,
)
from trainer.run.directory import open_own

__all__ = ["locked_run"]

_NAME_ATTEMPTS, _NAME_WAIT_S = 100, 0.01


def _holder(file: TextIO) -> str:
    """Who has the lock, which writes its name as soon as it has it."""
    for _ in range(_NAME_ATTEMPTS):
        file.seek(0)
        if name := file.read().strip():
            return name
        time.sleep(_NAME_WAIT_S)
    return "another process"


@contextmanager
def locked_run(run: Path) -> Iterator[None]:
    """Keeps a second trainer out of a run directory; the kernel frees the lock when the process ends, however it ends.

    Raises:
        ConfigError: another process has it; the message names it.
        CheckpointError: the file of the lock is a link or no regular file.
    """
    run.mkdir(parents=True, exist_ok=True)
    sync_upwards(run)
    with os.fdopen(open_own(run / ".lock", os.O_RDWR, run=run), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run}: {_holder(file)} is training here; wait for it or use another --run") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
