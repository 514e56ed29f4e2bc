"""The lock of a run folder: one writer at a time."""

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
from common.files import sync_upwards
from trainer.run.directory import open_own

__all__ = ["locked_run", "wait_until_free"]

_NAME_ATTEMPTS, _NAME_WAIT_S = 100, 0.01


def _holder(file: TextIO) -> str:
    """Return the name of the process that holds the lock. It writes the name as soon as it has the lock."""
    for _ in range(_NAME_ATTEMPTS):
        file.seek(0)
        if name := file.read().strip():
            return name
        time.sleep(_NAME_WAIT_S)
    return "another process"


@contextmanager
def locked_run(run: Path, *, doing: str = "is training here", option: str = "--run") -> Iterator[None]:
    """Lock a run directory against a second trainer. The kernel frees the lock when the process ends, for any reason.

    Args:
        run: the directory.
        doing: what the holder of the lock does, for the message.
        option: names the directory on the command line, for the message.

    Raises:
        ConfigError: another process holds the lock; the message names it.
        CheckpointError: the lock file is a link or no regular file.
    """
    run.mkdir(parents=True, exist_ok=True)
    sync_upwards(run)
    with os.fdopen(open_own(run / ".lock", os.O_RDWR, run=run), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{run}: {_holder(file)} {doing}; wait for it or use another {option}") from None
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def wait_until_free(run: Path, timeout_s: float) -> None:
    """Wait until no trainer holds the lock of a run directory, for example after its launcher was killed.

    It returns at once if there is no run, and after `timeout_s` in any case: the next trainer then reports the holder.

    Raises:
        CheckpointError: the lock file is a link or no regular file.
    """
    if not (run / ".lock").exists():
        return
    deadline = time.monotonic() + timeout_s
    with os.fdopen(open_own(run / ".lock", os.O_RDWR, run=run), "r+") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(_NAME_WAIT_S)
