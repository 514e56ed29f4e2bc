"""Processes of the ranks: their identity, signals to exactly one process, and how they end together."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LAUNCHER_VARIABLE = "TRAINER_LAUNCHER_PID"  # the variable with the pid of the process that started the ranks
EXIT_FILE_VARIABLE = "TRAINER_EXIT_FILE"  # path of the file where the launcher reads why the ranks ended
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ProcessId:
    """The identity of one process: the kernel uses a pid again, but not with the same start time."""

    pid: int
    started: int  # start time in the kernel's ticks since the machine was started

    @classmethod
    def own(cls) -> ProcessId:
        """Return the identity of this process; `started` is 0 on systems other than Linux."""
        pid = os.getpid()
        return cls(pid, (process_facts(pid) or ("", 0))[1])

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


def own_container() -> str:
    """Return an identity of this boot and of the pid namespace, in which a pid refers to one process. Each container has one."""
    try:
        return f"{_BOOT_ID.read_text().strip()}:{_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def end_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when its parent ends. Without `parent` this is the pid in TRAINER_LAUNCHER_PID."""
    if sys.platform != "linux":
        return
    set_death_signal(signal.SIGKILL)
    launcher = parent or int(os.environ.get(LAUNCHER_VARIABLE) or 0)
    if launcher and not is_running(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def write_exit_code(text: str) -> bool:
    """Write into the exit file, if the launcher has named one. Returns False if another process has already written there."""
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
    """Return state and start time of a process, from fields 3 and 22 of its `stat` (proc(5)); None if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def is_running(pid: int) -> bool:
    found = process_facts(pid)
    return found is not None and found[0] not in "ZX"


def process_state(process: ProcessId) -> str | None:
    """Return the kernel's state of a process (R, S, D, T, t); None if it has ended, even if another process has its pid now."""
    found = process_facts(process.pid)
    return found[0] if found is not None and found[1] == process.started and found[0] not in "ZX" else None


def send_signal(process: ProcessId, number: signal.Signals) -> None:
    """Raises ProcessLookupError if the process has ended, OSError if it is not ours or the kernel has no process descriptors."""
    descriptor = os.pidfd_open(process.pid)
    try:
        if process_state(process) is None:  # checked after the descriptor was opened, which refers to one process
            raise ProcessLookupError(f"process {process.pid} has ended")
        signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def signal_if_running(process: ProcessId, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended, also on a kernel without process descriptors."""
    try:
        send_signal(process, number)
    except ProcessLookupError:
        return
    except OSError:  # the kernel has no process descriptors, or a filter of the container forbids them
        if process_state(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def ask_for_stacks(process: ProcessId) -> None:
    # To the main thread, which then pauses: another thread would leave it running, and its stack would be inconsistent.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # in glibc since 2.30
    if process_state(process) and (tgkill is None or tgkill(process.pid, process.pid, signal.SIGUSR1)):
        signal_if_running(process, signal.SIGUSR1)


def set_death_signal(number: int) -> None:
    """Set the signal that the kernel sends to this process when the thread that started it ends (prctl(2)); 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
