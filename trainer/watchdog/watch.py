"""Detects a rank that makes no progress, reports which one and where, and ends the group, so that it can be started again.

Every rank writes a heartbeat: its step, its phase, and how long it may be silent there. One small process on each node reads the
heartbeats of all ranks and judges those of its node. It is a separate process, because a rank that is stopped, or that holds the
interpreter's lock, runs no thread. This module imports only the standard library, so that the process starts at once.

Heartbeats are files in the run folder, which other programs may change. So the watchdog does not take the processes of the ranks
from these files: it receives them when it is started, and sends signals to no other process.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

from trainer.watchdog.heartbeat import (
    Heartbeat,
    HeartbeatWriter,
    Timeouts,
    heartbeat_file,
    open_to_append,
    opened_folder,
    read_beat,
    remove_heartbeats,
    stacks_file,
)
from trainer.watchdog.processes import (
    LAUNCHER_VARIABLE,
    ProcessId,
    ask_for_stacks,
    end_with_parent,
    process_state,
    set_death_signal,
    signal_if_running,
    write_exit_code,
)

POLL_S = 0.5
_ASLEEP_S = 10 * POLL_S
OTHER_NODE_S = 60.0  # a rank on another node may be late: its own watchdog ends it, and the network shows its file later
_NOBODY: Mapping[int, Heartbeat] = MappingProxyType({})
_log = logging.getLogger(__name__)
_STACKS_S = 5.0
_STACKS_SETTLED_S = 1.0  # seconds without a new line in any of the files. On a busy machine a rank may not run for long.
_GRACE_S = 3.0
_MOST_SHOWN = 8
_READS_PER_S = 200  # of other nodes' heartbeats, which come from one server
_STATES = {"T": "stopped by a signal", "D": "waiting for a device or a file system", "R": "running", "S": "asleep"}
_SCRIPT = Path(__file__).resolve().with_name("__main__.py")
_TIED = "--tied-to"


@dataclass(frozen=True)
class Still:
    rank: int
    beat: Heartbeat  # its last heartbeat
    seconds: float  # time since the last heartbeat
    has_moved: bool = False  # whether the heartbeat has changed since the detector saw it first


class StallDetector:
    """The slowest rank limits the group. Each node's detector judges its own ranks; other heartbeats only delay its decision."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Heartbeat, float, bool]] = {}
        self._looked_s = -math.inf

    def observe(
        self,
        now_s: float,
        beats: Mapping[int, Heartbeat],
        stopped: Collection[int] = (),
        elsewhere: Mapping[int, Heartbeat] = _NOBODY,
    ) -> tuple[Still, ...]:
        """Return the ranks that stall the group, the longest silent one first; none while the slowest is within its limit.

        `elsewhere` has the beats of other nodes; one that has never changed may be left by an earlier start. After a long time
        without an observation all times of silence begin again, because perhaps no rank ran either.
        """
        if now_s - self._looked_s > _ASLEEP_S:
            self._seen.clear()
        self._looked_s = now_s
        before, self._seen = self._seen, {}
        for rank, beat in {**elsewhere, **beats}.items():
            is_same = rank in before and before[rank][0] == beat
            self._seen[rank] = before[rank] if is_same else (beat, now_s, rank in before)
        still = {rank: Still(rank, beat, now_s - since_s, moved) for rank, (beat, since_s, moved) in self._seen.items()}
        slowest = _slowest([still[rank] for rank in beats])
        if not slowest or any(each.seconds <= each.beat.limit_s for each in slowest):
            return ()
        others = _slowest([still[rank] for rank in elsewhere if still[rank].has_moved])
        if others and others[0].beat.place < slowest[0].beat.place:
            waits = any(each.seconds <= each.beat.limit_s + OTHER_NODE_S for each in others)
            blamed = [] if waits else others
        else:
            blamed = [each for each in slowest if each.rank in stopped] or slowest
        return tuple(sorted(blamed, key=lambda each: -each.seconds))


def _slowest(ranks: Collection[Still]) -> list[Still]:
    lowest = min((each.beat.place for each in ranks), default=None)
    return [each for each in ranks if each.beat.place == lowest]


def is_watched(enabled: str) -> bool:
    """Return whether the setting `watchdog.enabled` turns the watchdog on. `auto`: on ranks that a launcher has started."""
    return enabled == "on" or (enabled == "auto" and "RANK" in os.environ)


@contextmanager
def watched(
    run: Path,
    timeouts: Timeouts,
    *,
    rank: int,
    local_rank: int = 0,
    processes: Sequence[ProcessId] = (),
    num_ranks: int = 1,
    enabled: bool = True,
) -> Iterator[HeartbeatWriter]:
    """Yield the heartbeat of this rank. The watchdog of the node, which local rank 0 starts, watches it meanwhile.

    A rank that receives SIGUSR2 appends the stacks of its threads to `<run>/stacks/rank-N.txt` as soon as its main thread executes
    Python. SIGUSR1 does so at once, also in a rank that is stuck. It reads the frames of other threads while they may run, and so
    can end the process. The watchdog may end `processes`, the ranks on this node, which are never read from a file; empty: only
    this process.
    """
    enabled = enabled and sys.platform == "linux"
    with ExitStack() as stack:
        if enabled:
            stack.enter_context(_answering_with_stacks(stacks_file(run, rank)))
        heartbeat = HeartbeatWriter(heartbeat_file(run, rank), timeouts)
        if enabled and local_rank == 0:
            stack.enter_context(_watchdog_process(run, rank, processes or [ProcessId.own()], num_ranks))
        stack.callback(heartbeat.close)
        yield heartbeat


def tied_command() -> list[str]:
    """A command after it dies with this process. It receives its own pid in TRAINER_LAUNCHER_PID, for `end_with_parent`."""
    return [sys.executable, "-I", "-S", str(_SCRIPT), _TIED, str(os.getpid())]


def main(arguments: Sequence[str]) -> None:
    """Run the watchdog: read the heartbeats twice a second until the process that started it ends.

    The arguments are the run, the lowest rank on this node, the number of ranks on all nodes, the pid of the parent, and PID:START
    of each rank on this node.
    """
    if arguments[:1] == [_TIED]:
        end_with_parent(int(arguments[1]))
        os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
        os.execv(arguments[2], list(arguments[2:]))
    run, first_rank, num_ranks, parent = Path(arguments[0]), *map(int, arguments[1:4])
    processes = dict(enumerate(map(ProcessId.parse, arguments[4:]), first_rank))  # of the ranks on this node
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT ends this process without a traceback
    others = [rank for rank in range(num_ranks) if rank not in processes]
    detector = StallDetector()
    known: set[int] = set()
    elsewhere: dict[int, Heartbeat] = {}
    read_s = -math.inf
    while True:
        time.sleep(POLL_S)
        beats, states = _look(run, processes)
        if "t" in states.values():  # a debugger has stopped a rank, so no time limit applies
            beats = {}
        stopped = [rank for rank, state in states.items() if state == "T"]
        if time.monotonic() >= read_s + len(others) / _READS_PER_S:
            elsewhere, read_s = _beats_of(run, others), time.monotonic()
            known |= elsewhere.keys()
        if blamed := detector.observe(time.monotonic(), beats, stopped, elsewhere):
            reason = _reason(blamed, states, elsewhere, known - elsewhere.keys())
            _end_group(run, reason, [still.rank for still in blamed], beats, states)
            if others:
                with suppress(OSError):
                    remove_heartbeats(run, processes)
            return


def _look(run: Path, processes: Mapping[int, ProcessId]) -> tuple[dict[int, Heartbeat], dict[int, str]]:
    # a beat that names another process than the rank's is from an earlier start or was changed
    beats, states = {}, {}
    for rank, beat in _beats_of(run, processes).items():
        if beat.process == processes[rank] and (state := process_state(beat.process)):
            beats[rank], states[rank] = beat, state
    return beats, states


def _beats_of(run: Path, ranks: Iterable[int]) -> dict[int, Heartbeat]:
    found = {}
    for rank in ranks:
        with suppress(OSError):  # the rank has not written a beat yet
            if (beat := Heartbeat.from_bytes(read_beat(heartbeat_file(run, rank)))) is not None and beat.phase != "done":
                found[rank] = beat
    return found


def _reason(blamed: Sequence[Still], states: Mapping[int, str], elsewhere: Mapping[int, Heartbeat], ended: Collection[int]) -> str:
    """`ended` are ranks of other nodes that had a heartbeat and have none any more, or are done."""
    reasons = [_described(still, states.get(still.rank)) for still in blamed]
    first = blamed[0].beat
    if blamed[0].rank not in states:
        reasons.append("perhaps its node or the network between the nodes is lost")
    elif first.phase != "data":  # it may be waiting for other nodes
        if same := [rank for rank, beat in elsewhere.items() if beat.place == first.place]:
            waits = _ranks(same, "waits", "wait")
            reasons.append(f"{waits} there too, so perhaps the network between the nodes is lost")
        elif elsewhere:
            are = _ranks(elsewhere, "is", "are")
            reasons.append(f"{are} further, so rank {blamed[0].rank} is stuck or the network between the nodes is lost")
    if ended:
        reasons.append(f"{_ranks(ended, 'has', 'have')} ended, perhaps because the network between the nodes is lost")
    return "; ".join(reasons)


def _ranks(numbers: Collection[int], of_one: str, of_several: str) -> str:
    if len(numbers) == 1:
        return f"rank {next(iter(numbers))} on another node {of_one}"
    shown = sorted(numbers)
    more = " and more" if len(shown) > _MOST_SHOWN else ""
    return f"ranks {', '.join(map(str, shown[:_MOST_SHOWN]))}{more} on other nodes {of_several}"


def _end_group(run: Path, reason: str, blamed: Sequence[int], beats: Mapping[int, Heartbeat], states: Mapping[int, str]) -> None:
    """Report why the group ends, collect the stacks of this node's ranks, and kill first the blamed ranks and then the rest."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # finish ending the group, even if the rank that started this process ends
    set_death_signal(0)
    line = (
        f"error: {reason}. The stacks of all threads are in {stacks_file(run, 0).parent}. All ranks are ended now. If the rank was "
        "slow and not stuck, raise watchdog.stall_s, or watchdog.slow_s for loading, evaluation, saves and the first steps\n"
    )
    with suppress(OSError):  # the reader of stderr has gone
        sys.stderr.write(line)
        sys.stderr.flush()
    with suppress(OSError):
        write_exit_code(f"1 {reason}")  # the code of a crash

    def ask(rank: int) -> None:
        ask_for_stacks(beats[rank].process)
        if states[rank] == "T":  # a stopped process cannot answer; it is killed shortly after it continues
            signal_if_running(beats[rank].process, signal.SIGCONT)

    with suppress(OSError):  # a full disk must not prevent the end of the group
        collect_stacks(run, beats, ask)
    for rank in blamed:
        if rank in beats:  # not a rank of another node
            signal_if_running(beats[rank].process, signal.SIGKILL)
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and any(process_state(beat.process) for beat in beats.values()):
        time.sleep(0.05)
    for beat in beats.values():
        signal_if_running(beat.process, signal.SIGKILL)


def _described(still: Still, state: str | None) -> str:
    beat = still.beat
    where = "on another node" if state is None else f"process {beat.pid}, {_STATES.get(state, f'in state {state}')}"
    return (
        f"rank {still.rank} ({where}) has made no progress for {still.seconds:.0f} s in phase {beat.phase} of step {beat.step} "
        f"(limit {beat.limit_s:.0f} s)"
    )


def collect_stacks(run: Path, beats: Mapping[int, Heartbeat], ask: Callable[[int], None]) -> dict[int, int]:
    """Ask ranks to append their stacks below a line with the time, and wait at most 5 seconds. `ask` sends a signal to a rank.

    Returns the offset in bytes of the new lines in the file of each rank that has one. OSError: a file cannot be written.
    """
    begins, empty = {}, {}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    for rank, beat in beats.items():
        if not (path := stacks_file(run, rank)).exists():
            continue
        with os.fdopen(open_to_append(path), "a") as file:
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


def _append_stacks(descriptor: int, _signal: int, frame: FrameType | None) -> None:
    """Append the stacks as `faulthandler` does, but while no other thread can run."""
    frames: dict[int, FrameType | None] = {**sys._current_frames(), threading.get_ident(): frame}
    lines = []
    for thread, one in frames.items():
        lines.append(f"Thread {thread:#018x} (most recent call first):\n")
        while one is not None:
            lines.append(f'  File "{one.f_code.co_filename}", line {one.f_lineno} in {one.f_code.co_name}\n')
            one = one.f_back  # noqa: PLW2901
    with suppress(OSError):  # a full disk must not end the run
        os.write(descriptor, "".join(lines).encode("utf-8", "backslashreplace"))  # a file object may be in use by a request before


@contextmanager
def _answering_with_stacks(path: Path) -> Iterator[None]:
    # later requests are ignored, because they would kill the rank while it ends
    with os.fdopen(open_to_append(path), "a") as file:
        with suppress(ValueError):  # only the main thread may do this
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # `unregister` restores this
            signal.signal(signal.SIGUSR2, partial(_append_stacks, file.fileno()))
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            with suppress(ValueError):
                signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if os.fstat(file.fileno()).st_size == 0:
            with opened_folder(path.parent) as folder, suppress(FileNotFoundError):
                os.unlink(path.name, dir_fd=folder)


@contextmanager
def _watchdog_process(run: Path, first_rank: int, processes: Sequence[ProcessId], num_ranks: int) -> Iterator[None]:
    """Run the watchdog while the context lasts. It has a separate session, because torchrun signals every process of this one."""
    command = [
        *(sys.executable, "-I", "-S", str(_SCRIPT), str(run.resolve())),
        *map(str, (first_rank, num_ranks, os.getpid(), *processes)),
    ]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        _log.warning("the watchdog could not be started (%s); a rank that makes no progress will not be detected", error)
        yield
        return
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):  # it is just ending this group
            process.wait(1)
