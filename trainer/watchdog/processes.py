"""Processes of the ranks: which one a pid means, signals to it and to no other, and how they end together."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "EXIT_FILE_VARIABLE",
    "LAUNCHER_VARIABLE",
    "ProcessId",
    "ask_for_stacks",
    "end_with_parent",
    "is_running",
    "leave_reason",
    "own_container",
    "process_facts",
    "process_state",
    "send_signal",
    "set_death_signal",
    "signal_if_running",
]

LAUNCHER_VARIABLE = "TRAINER_LAUNCHER_PID"
"""Names the process that started the ranks."""
EXIT_FILE_VARIABLE = "TRAINER_EXIT_FILE"
"""Names the file where `entrypoints/train` looks for the reason why the ranks ended; torchrun makes 1 of every exit code."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessId:
    """One process for ever: the kernel uses a pid again, but not with the same time of start."""

    pid: int
    started: int
    """In the kernel's ticks since the machine was started."""

    @classmethod
    def own(cls) -> ProcessId:
        """That of this process; `started` is 0 but on Linux."""
        pid = os.getpid()
        return cls(pid, (process_facts(pid) or ("", 0))[1])

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """The inverse of `str`."""
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


def own_container() -> str:
    """Names this start of the machine (boot id) and the pid namespace of this process, which a container has of its own.

    Two processes with the same answer mean the same process by a pid. Empty but on Linux.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}:{_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def end_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process as soon as the one that started it has ended; does nothing but on Linux.

    Args:
        parent: a process without which this one is to end at once, as it may have gone before the kernel was asked. None: the
            one in the variable TRAINER_LAUNCHER_PID, if it is set.
    """
    if sys.platform != "linux":
        return
    set_death_signal(signal.SIGKILL)
    launcher = parent or int(os.environ.get(LAUNCHER_VARIABLE) or 0)
    if launcher and not is_running(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def leave_reason(text: str) -> bool:
    """Writes why this process ends, its exit code first, where `entrypoints/train` looks; false where another has done so already.

    Raises:
        OSError: the file cannot be written.
    """
    if not (path := os.environ.get(EXIT_FILE_VARIABLE)):
        return True
    with Path(path).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if file.read():
            return False
        file.write(f"{text}\n")
        return True


def process_facts(pid: int) -> tuple[str, int] | None:
    """State and time of start of a process, from fields 3 and 22 of its `stat` (proc(5)); None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def is_running(pid: int) -> bool:
    """True where there is such a process and it has not ended."""
    found = process_facts(pid)
    return found is not None and found[0] not in "ZX"


def process_state(process: ProcessId) -> str | None:
    """State of a process as the kernel names it (R, S, D, T, t); None where it has ended, even if another has its number now."""
    found = process_facts(process.pid)
    return found[0] if found is not None and found[1] == process.started and found[0] not in "ZX" else None


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Sends a signal to a process, and to no other, even if the process ends at this moment and another gets its number.

    Raises:
        ProcessLookupError: it has ended.
        OSError: it belongs to another user, or the kernel has no descriptors of processes (Linux 5.3).
    """
    descriptor = os.pidfd_open(process.pid)
    try:
        if process_state(process) is None:  # asked with the descriptor at hand, which stands for one process for ever
            raise ProcessLookupError(f"process {process.pid} has ended")
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def signal_if_running(process: ProcessId, number: signal.Signals) -> None:
    """`send_signal` to a process that may have ended, also on a kernel without descriptors of processes."""
    try:
        send_signal(process, number)
    except ProcessLookupError:
        return
    except OSError:  # the kernel, or a filter of the container, knows no descriptors of processes
        if process_state(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def ask_for_stacks(process: ProcessId) -> None:
    """Sends SIGUSR1 to the main thread of a rank, which then stands still while its stack is written.

    Sent to the process, it may come to any thread of one that was stopped, and what the main thread does meanwhile tears its stack.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if process_state(process) and (tgkill is None or tgkill(process.pid, process.pid, signal.SIGUSR1)):
        signal_if_running(process, signal.SIGUSR1)


def set_death_signal(number: int) -> None:
    """The signal that the kernel sends to this process when the thread that started it ends (prctl(2)); 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
