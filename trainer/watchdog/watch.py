"""Notices a rank that stands still, says which one and where, and ends the group, so that it can be started again.

Every rank writes a heartbeat: which step it is at, in which phase, and for how long it may be silent there. One small process on
each node reads those of the node's ranks. It is a process of its own because a rank that is stopped, or that holds the
interpreter's lock, runs no thread; and this module imports nothing but the standard library, so that it starts at once.

Heartbeats are files in the run folder, which others may change. They say what a rank is doing, and never which process it is: the
watchdog is given the processes of the ranks when it is started, and sends signals to no other.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import faulthandler
import fcntl
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, get_args

__all__ = [
    "EXIT_FILE_VARIABLE",
    "LAUNCHER_VARIABLE",
    "Beat",
    "Heartbeat",
    "Patience",
    "Phase",
    "ProcessId",
    "StallDetector",
    "Still",
    "clear_heartbeats",
    "collect_stacks",
    "end_with_parent",
    "heartbeat_file",
    "leave_reason",
    "own_container",
    "process_state",
    "send_signal",
    "stacks_file",
    "tied_command",
    "watched",
]

_log = logging.getLogger(__name__)

Phase = Literal["loading", "data", "forward", "reduce", "report", "evaluate", "save", "done"]
"""What a rank is doing, in the order within a step. `reduce`: from the last backward pass on, where ranks wait for each other."""

LAUNCHER_VARIABLE = "TRAINER_LAUNCHER_PID"
"""Names the process that started the ranks."""

EXIT_FILE_VARIABLE = "TRAINER_EXIT_FILE"
"""Names the file where `entrypoints/train` looks for the reason why the ranks ended; torchrun makes 1 of every exit code."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_SLOW_PHASES = ("loading", "evaluate", "save")
_FIRST_STEPS = 3
_RECENT_STEPS = 50
_LEAST_STALL_S = 30.0
_SLOWER = 3.0

_POLL_S = 0.5
_ASLEEP_S = 10 * _POLL_S
_STACKS_S = 5.0
_STACKS_SETTLED_S = 1.0
"""Without a new line in any of the files: on a machine with much to do a rank may not be at its turn for long."""
_GRACE_S = 3.0

_MAX_BEAT_BYTES = 4096
_UNKNOWN = "-"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_STATES = {"T": "stopped by a signal", "D": "waiting for a device or a file system", "R": "running", "S": "asleep"}
_PR_SET_PDEATHSIG = 1
_TIED = "--tied-to"


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
        return cls(pid, (_process(pid) or ("", 0))[1])

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """The inverse of `str`."""
        pid, _, started = text.partition(":")
        return cls(int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"


@dataclass(frozen=True)
class Patience:
    """For how long a rank may be silent."""

    stall_s: float | None
    """In the phases of a step; None: the larger of 30 s and three times the slowest of the last 50 steps."""
    slow_s: float
    """In the phases that may take long, and in the first three steps, in which code is compiled."""

    def limit_s(self, phase: Phase, step_seconds: Collection[float]) -> float:
        """Seconds of silence that are allowed in a phase, after steps that took so long; infinite once a rank is done."""
        if phase == "done":
            return math.inf
        stall_s = self.stall_s or max(_LEAST_STALL_S, _SLOWER * max(step_seconds, default=0.0))
        return max(self.slow_s, stall_s) if phase in _SLOW_PHASES or len(step_seconds) < _FIRST_STEPS else stall_s


@dataclass(frozen=True)
class Beat:
    """One heartbeat, as it stands in the rank's file: a line of fixed length, so that the next one replaces it in place."""

    number: int
    pid: int
    started: int
    """When the process was started, in the kernel's ticks: with its pid it names one process for ever."""
    step: int
    phase: Phase
    limit_s: float
    """For how long no other beat need follow."""
    lap: int = 0
    """How often the run has gone back to an earlier step."""
    container: str = ""
    """Where the pid means this process: see `own_container`."""

    @property
    def process(self) -> ProcessId:
        """The process that says that it has sent it."""
        return ProcessId(self.pid, self.started)

    @property
    def place(self) -> tuple[int, int, int]:
        """How far the rank has come: of several, the one with the lowest place is waited for."""
        return self.lap, self.step, _PHASES.index(self.phase)

    def to_bytes(self) -> bytes:
        """The line."""
        return (
            f"beat {self.number:>12} pid {self.pid:>10} started {self.started:>20} container {self.container or _UNKNOWN:<47} "
            f"lap {self.lap:>6} step {self.step:>12} limit_s {self.limit_s:>12.1f} phase {self.phase:<10}\n"
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Beat | None:
        """The beat of a line; None where it is none, which can be while it is written."""
        words = data.decode(errors="replace").split()
        values = dict(zip(words[::2], words[1::2], strict=False))
        try:
            number, pid, started, step, lap = (int(values[name]) for name in ("beat", "pid", "started", "step", "lap"))
            phase = _PHASES[_PHASES.index(values["phase"])]
            limit_s = float(values["limit_s"])
            container = values["container"].removeprefix(_UNKNOWN)
            return None if math.isnan(limit_s) else cls(number, pid, started, step, phase, limit_s, lap, container)
        except (KeyError, ValueError):
            return None


class Heartbeat:
    """Shows what this rank is doing, to the watchdog and to the container's health check. A beat takes a few microseconds.

    Args:
        path: the rank's file.
        patience: for how long it may be silent.
        clock: seconds that never run backwards.

    Raises:
        OSError: from every method; the file cannot be written, or a link lies in the way to it.
    """

    def __init__(self, path: Path, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        with _own_folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)
            self._file = os.open(path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
        self._patience = patience
        self._clock = clock
        self._process, self._container = ProcessId.own(), own_container()
        self._number = 0
        self._phase: Phase = "loading"
        self._step = 0
        self._lap = 0
        self._step_began: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.beat()

    def at(self, phase: Phase, step: int | None = None) -> None:
        """Enters a phase; `step` is the number of the step that begins with it, if one does. It falls where a run goes back."""
        if step is not None and step != self._step:
            self._lap += step < self._step
            now = self._clock()
            if self._step_began is not None:
                self._step_seconds.append(now - self._step_began)
            self._step, self._step_began = step, now
        self._phase = phase
        self.beat()

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Enters a phase and then goes back to the one before; the time in between is none of the step's."""
        before, step_began, entered = self._phase, self._step_began, self._clock()
        self.at(phase)
        yield
        if step_began is not None:
            self._step_began = step_began + self._clock() - entered
        self.at(before)

    def beat(self) -> None:
        """Shows that this rank is alive, in the phase in which it was."""
        self._number += 1
        limit_s = self._patience.limit_s(self._phase, self._step_seconds)
        pid, started = self._process.pid, self._process.started
        beat = Beat(self._number, pid, started, self._step, self._phase, limit_s, self._lap, self._container)
        os.pwrite(self._file, beat.to_bytes(), 0)

    def expect_slow_steps(self) -> None:
        """Allows the next steps the time of the first ones: something is different, and code may be compiled again."""
        self._step_seconds.clear()

    def close(self) -> None:
        """Says that this rank is done, and writes no more."""
        self.at("done")
        os.close(self._file)


@dataclass(frozen=True)
class Still:
    """A rank that stands still."""

    rank: int
    beat: Beat
    """Its last sign of life."""
    seconds: float
    """Time since then."""


class StallDetector:
    """Decides from what is seen of the ranks, at so many moments, whether their group stands still, and because of whom.

    A group is as far as its hindmost rank: the others wait for it in the next exchange, however long it may take.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._looked_s = -math.inf

    def observe(self, now_s: float, beats: Mapping[int, Beat], stopped: Collection[int] = ()) -> tuple[Still, ...]:
        """The ranks to blame, the one that has been silent longest first; none while the hindmost is within its limit.

        Args:
            now_s: seconds on a clock that never runs backwards. Where much time has passed since the last look, this
                process did not run, so perhaps no rank did: all counts begin again.
            beats: the last beat of each rank that is alive and not done.
            stopped: ranks that the kernel keeps from running.
        """
        if now_s - self._looked_s > _ASLEEP_S:
            self._seen.clear()
        self._looked_s = now_s
        self._seen = {
            rank: before if (before := self._seen.get(rank)) and before[0] == beat else (beat, now_s)
            for rank, beat in beats.items()
        }
        still = [Still(rank, beat, now_s - since_s) for rank, (beat, since_s) in self._seen.items()]
        lowest = min((each.beat.place for each in still), default=None)
        hindmost = [each for each in still if each.beat.place == lowest]
        if not hindmost or any(each.seconds <= each.beat.limit_s for each in hindmost):
            return ()
        blamed = [each for each in hindmost if each.rank in stopped] or hindmost
        return tuple(sorted(blamed, key=lambda each: -each.seconds))


def own_container() -> str:
    """Names this start of the machine (boot id) and the pid namespace of this process, which a container has of its own.

    Two processes with the same answer mean the same process by a pid. Empty but on Linux.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()}:{_PID_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def clear_heartbeats(run: Path) -> None:
    """Removes what an earlier start of the run has left; to be called by rank 0 alone, before any rank writes its own."""
    with _own_folder(run / "heartbeat") as folder:
        for name in os.listdir(folder):  # noqa: PTH208 - of this very directory, whatever has its name now
            if name.startswith("rank-"):
                os.unlink(name, dir_fd=folder)


@contextmanager
def watched(
    run: Path,
    patience: Patience,
    *,
    rank: int,
    local_rank: int = 0,
    processes: Sequence[ProcessId] = (),
    enabled: bool = True,
) -> Iterator[Heartbeat]:
    """The heartbeat of this rank; while the context lasts, the watchdog of its node watches it.

    Local rank 0 starts the watchdog. All ranks answer its SIGUSR1 with the stacks of all their threads, which they append to
    `<run>/stacks/rank-N.txt`; that takes no lock, so it works while the interpreter's lock is held.

    Args:
        run: the run's directory.
        patience: how long a rank may be silent.
        rank: number of this rank.
        local_rank: its number on this node.
        processes: those of the ranks on this node, in their order, which the watchdog may end; none: this one alone. They are
            known from the processes themselves, and never from a file.
        enabled: false: the heartbeat alone, and nothing is ever ended. So it is everywhere but on Linux.

    Raises:
        OSError: the run's directory cannot be written.
    """
    enabled = enabled and sys.platform == "linux"
    with ExitStack() as stack:
        if enabled:
            stack.enter_context(_answering_with_stacks(stacks_file(run, rank)))
        heartbeat = Heartbeat(heartbeat_file(run, rank), patience)
        if enabled and local_rank == 0:
            stack.enter_context(_watchdog_process(run, rank, processes or [ProcessId.own()]))
        stack.callback(heartbeat.close)
        yield heartbeat


def end_with_parent(parent: int | None = None) -> None:
    """Has the kernel kill this process as soon as the one that started it has ended; does nothing but on Linux.

    Args:
        parent: a process without which this one is to end at once, as it may have gone before the kernel was asked. None: the
            one in the variable TRAINER_LAUNCHER_PID, if it is set.
    """
    if sys.platform != "linux":
        return
    _set_death_signal(signal.SIGKILL)
    launcher = parent or int(os.environ.get(LAUNCHER_VARIABLE) or 0)
    if launcher and not _runs(launcher):
        os.kill(os.getpid(), signal.SIGKILL)


def tied_command() -> list[str]:
    """The beginning of a command line; the command that follows is killed as soon as this process ends.

    The command gets its own pid in the variable TRAINER_LAUNCHER_PID, for `end_with_parent` in what it starts.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), _TIED, str(os.getpid())]


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


def main(arguments: Sequence[str]) -> None:
    """The watchdog itself: looks at the heartbeats twice a second until the process that started it ends."""
    if arguments[:1] == [_TIED]:
        _run_tied(int(arguments[1]), arguments[2:])
    parser = argparse.ArgumentParser(
        prog="python -m trainer.watchdog.watch", description="Ends a group of ranks that stands still."
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--first_rank", type=int, required=True, help="lowest rank on this node")
    parser.add_argument("--processes", nargs="+", type=ProcessId.parse, required=True, help="PID:START of each rank on this node")
    parser.add_argument("--parent", type=int, required=True, help="process without which there is nothing to watch")
    options = parser.parse_args(arguments)
    end_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it ends this process without a traceback
    processes = dict(enumerate(options.processes, options.first_rank))
    detector = StallDetector()
    while True:
        time.sleep(_POLL_S)
        beats, states = _look(options.run, processes)
        if "t" in states.values():  # under a debugger, where time is the user's
            beats = {}
        stopped = [rank for rank, state in states.items() if state == "T"]
        if blamed := detector.observe(time.monotonic(), beats, stopped):
            _end_group(options.run, blamed, beats, states)
            return


def _run_tied(parent: int, command: Sequence[str]) -> NoReturn:
    end_with_parent(parent)
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    os.execv(command[0], list(command))


def _look(run: Path, processes: Mapping[int, ProcessId]) -> tuple[dict[int, Beat], dict[int, str]]:
    """Last beats, and states as the kernel names them, of the ranks that are alive and not done.

    A beat that names another process than the rank's is of an earlier start, or was changed: it counts for nothing.
    """
    beats, states = {}, {}
    for rank, process in processes.items():
        try:
            beat = Beat.from_bytes(_read_own(heartbeat_file(run, rank)))
        except OSError:  # it has not begun
            continue
        if beat is not None and beat.process == process and beat.phase != "done" and (state := process_state(process)):
            beats[rank], states[rank] = beat, state
    return beats, states


def _end_group(run: Path, blamed: Sequence[Still], beats: Mapping[int, Beat], states: Mapping[int, str]) -> None:
    """Says who stands still and where, has all ranks write their stacks, and kills: those to blame first, the rest if they stay."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the group is ended to the end, whatever becomes of the rank that started this
    _set_death_signal(0)
    reason = "; ".join(_described(still, states[still.rank]) for still in blamed)
    _say(
        f"error: {reason}. The stacks of all threads are in {stacks_file(run, 0).parent}; the group is ended now. If it was slow "
        "and not stuck, raise watchdog.stall_s, or watchdog.slow_s for loading, evaluation, saves and the first steps\n"
    )
    with suppress(OSError):
        leave_reason(f"1 {reason}")  # the code of a crash

    def ask(rank: int) -> None:
        _ask_for_stacks(beats[rank].process)
        if states[rank] == "T":  # else it could not answer; it is killed before it has gone far
            _signal(beats[rank].process, signal.SIGCONT)

    with suppress(OSError):  # a full disk must not keep the group from its end
        collect_stacks(run, beats, ask)
    for still in blamed:
        _signal(still.beat.process, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process_state(beat.process) for beat in beats.values()):
        time.sleep(0.05)
    for beat in beats.values():
        _signal(beat.process, signal.SIGKILL)


def _described(still: Still, state: str) -> str:
    beat = still.beat
    return (
        f"rank {still.rank} (process {beat.pid}, {_STATES.get(state, f'in state {state}')}) has stood still for "
        f"{still.seconds:.0f} s in phase {beat.phase} of step {beat.step}, which may take {beat.limit_s:.0f} s"
    )


def _say(line: str) -> None:
    with suppress(OSError):  # nobody listens any more
        sys.stderr.write(line)
        sys.stderr.flush()


def collect_stacks(run: Path, beats: Mapping[int, Beat], ask: Callable[[int], None]) -> dict[int, int]:
    """Has ranks append their stacks to their files, each below a line that says when; waits for them, but for seconds only.

    Args:
        run: the run's directory.
        beats: the last beat of each rank.
        ask: called with each rank's number; sends SIGUSR1 to its process.

    Returns:
        Where in the file of a rank the new lines begin, in bytes. A rank without a file answers to nothing and is left out.

    Raises:
        OSError: a file cannot be written.
    """
    begins, empty = {}, {}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for rank, beat in beats.items():
        if not (path := stacks_file(run, rank)).exists():
            continue
        with os.fdopen(_open_own(path), "a") as file:
            begins[rank] = os.fstat(file.fileno()).st_size
            file.write(f"# {now} rank {rank}, process {beat.pid}, step {beat.step}, phase {beat.phase}\n")
        empty[path] = path.stat().st_size
        ask(rank)
    sizes = dict(empty)
    changed_s = begun_s = time.monotonic()
    while (now_s := time.monotonic()) < begun_s + _STACKS_S:
        latest = {path: path.stat().st_size for path in sizes}
        changed_s = changed_s if latest == sizes else now_s
        sizes = latest
        if now_s > changed_s + _STACKS_SETTLED_S and all(sizes[path] > empty[path] for path in sizes):
            break
        time.sleep(0.05)
    return begins


@contextmanager
def _answering_with_stacks(path: Path) -> Iterator[None]:
    """While the context lasts, SIGUSR1 appends the stacks of all threads of this process to a file. Later it is ignored.

    Without that, a request that comes while the rank ends would kill it.
    """
    with os.fdopen(_open_own(path), "a") as file:
        with suppress(ValueError):  # only the main thread may do this
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # what `unregister` goes back to
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        if os.fstat(file.fileno()).st_size == 0:
            with _own_folder(path.parent) as folder, suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)


@contextmanager
def _watchdog_process(run: Path, first_rank: int, processes: Sequence[ProcessId]) -> Iterator[None]:
    """The watchdog, while the context lasts. It is no child of the session, whose every process torchrun signals."""
    command = [
        *(sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(run.resolve())),
        *("--first_rank", str(first_rank), "--parent", str(os.getpid()), "--processes", *map(str, processes)),
    ]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        _log.warning("the watchdog could not be started (%s); a rank that stands still will not be noticed", error)
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # it is ending this group
            process.wait(1)


def heartbeat_file(run: Path, rank: int) -> Path:
    """Where a rank writes its heartbeat."""
    return run / "heartbeat" / f"rank-{rank}"


def stacks_file(run: Path, rank: int) -> Path:
    """Where a rank appends its stacks when it is asked for them."""
    return run / "stacks" / f"rank-{rank}.txt"


@contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that is created if it is missing; a link to one is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        raise _in_the_way(path, "directory") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_own(path: Path) -> int:
    """A descriptor for appending to a regular file with one name, which no link leads to; it is created if it is missing."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    with _own_folder(path.parent) as folder:
        try:
            descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _in_the_way(path, "regular file") from None
            raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _in_the_way(path, "regular file with one name")
    return descriptor


def _read_own(path: Path) -> bytes:
    """The beginning of a file that no link leads to; never waits for the other end of a pipe."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        return os.read(descriptor, _MAX_BEAT_BYTES)
    finally:
        os.close(descriptor)


def _in_the_way(path: Path, wanted: str) -> OSError:
    return OSError(f"{path} is no {wanted} (a link to one does not count); remove it and run the same command again")


def _process(pid: int) -> tuple[str, int] | None:
    """State and time of start of a process, from fields 3 and 22 of its `stat` (proc(5)); None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[19])


def _runs(pid: int) -> bool:
    """True where there is such a process and it has not ended."""
    found = _process(pid)
    return found is not None and found[0] not in "ZX"


def process_state(process: ProcessId) -> str | None:
    """State of a process as the kernel names it (R, S, D, T, t); None where it has ended, even if another has its number now."""
    found = _process(process.pid)
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


def _signal(process: ProcessId, number: signal.Signals) -> None:
    try:
        send_signal(process, number)
    except ProcessLookupError:
        return
    except OSError:  # the kernel, or a filter of the container, knows no descriptors of processes
        if process_state(process):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _ask_for_stacks(process: ProcessId) -> None:
    """Sends SIGUSR1 to the main thread of a rank, which then stands still while its stack is written.

    Sent to the process, it may come to any thread of one that was stopped, and what the main thread does meanwhile tears its stack.
    """
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc has it since 2.30
    if process_state(process) and (tgkill is None or tgkill(process.pid, process.pid, signal.SIGUSR1)):
        _signal(process, signal.SIGUSR1)


def _set_death_signal(number: int) -> None:
    """The signal that the kernel sends to this process when the thread that started it ends (prctl(2)); 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


if __name__ == "__main__":
    main(sys.argv[1:])
