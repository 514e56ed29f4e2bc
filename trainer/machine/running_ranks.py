"""The ranks of a run that are running now, in this container (or on this machine, outside of a container).

A heartbeat is a file. An earlier container may have left it, a rank on another machine may have written it, and anybody with
access to the folder may have changed it. It counts only if the process that it names is in this container, has not ended, and
has this file open for writing. The kernel reports open files, so another process cannot be mistaken for a rank.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from common.files import UnusableFileError, open_input
from trainer.watchdog.heartbeat import MAX_BEAT_BYTES, Heartbeat
from trainer.watchdog.processes import ProcessId, own_container, process_state

_NAME = re.compile(r"rank-(0|[1-9][0-9]{0,8})")  # each rank has one name: rank-00 is not rank 0
_WRITABLE = 0o200  # in the mode of a link in /proc/PID/fd: the file is open for writing (proc(5))


@dataclass(frozen=True)
class Rank:
    number: int
    beat: Heartbeat | None  # its last heartbeat; None if the file holds none
    beaten_s: float  # time of the last heartbeat, in seconds since 1970
    absence: str = ""  # why the rank is not running here; empty if it is


def ranks_of(run: Path) -> list[Rank]:
    """Return the ranks with a heartbeat file in a run's directory, in their order. No content of a file makes this fail."""
    found: list[Rank] = []
    with suppress(OSError):
        for path in (run / "heartbeat").iterdir():
            if not _NAME.fullmatch(path.name):
                continue
            with suppress(OSError, UnusableFileError), open_input(path, below=run) as file:
                status = os.fstat(file.fileno())
                beat = Heartbeat.from_bytes(file.read(MAX_BEAT_BYTES))
                number = int(path.name.removeprefix("rank-"))
                found.append(Rank(number, beat, status.st_mtime, _absence(beat, status, path.name)))
    return sorted(found, key=lambda rank: rank.number)


def _absence(beat: Heartbeat | None, status: os.stat_result, name: str) -> str:
    if beat is None:
        return "its heartbeat file holds no heartbeat"
    if beat.container != (here := own_container()):
        same_boot = beat.container.partition(":")[0] == here.partition(":")[0]
        return f"it belongs to another {'container' if same_boot else 'machine, or to an earlier start of this one'}"
    if beat.phase == "done":
        return "it is done"
    if process_state(beat.process) is None:
        return f"its process {beat.pid} has ended"
    try:
        writes = _writes(beat.process, status, name)
    except OSError as error:
        return f"its process {beat.pid} cannot be looked at ({error.strerror}); use the user that started the training"
    return "" if writes else f"process {beat.pid}, which its heartbeat names, is not this rank"


def _writes(process: ProcessId, status: os.stat_result, name: str) -> bool:
    for link in list(Path(f"/proc/{process.pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if link.readlink().name == name and link.lstat().st_mode & _WRITABLE:
                found = link.stat()
                if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                    return True
    return False
