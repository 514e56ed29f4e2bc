"""A training run of two ranks under `entrypoints/train`, started as a person or a scheduler would, and its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.runs import ROOT, arguments
from trainer.config import TrainConfig
from trainer.watchdog.heartbeat import Heartbeat


def start_entrypoint(config: TrainConfig, **environment: str) -> subprocess.Popen[bytes]:
    """Start the entrypoint with two ranks, without a delay before restarts. The output goes to `<run>.log` next to the run."""
    own = {"PYTHON": sys.executable, "CPU_RANKS": "2", "OMP_NUM_THREADS": "1", "TRAIN_RESTART_DELAY_S": "0"}
    with config.run.with_suffix(".log").open("a") as output:
        return subprocess.Popen(
            [ROOT / "entrypoints/train", *arguments(config)],
            cwd=ROOT,
            env=os.environ | own | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def started(config: TrainConfig, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the entrypoint with two ranks, and end it at the end of the block."""
    process = start_entrypoint(config, **environment)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop the entrypoint. If it does not stop, kill it with all its processes."""
    everything = [process.pid, *descendants(process.pid)]
    process.terminate()
    try:
        process.wait(70)
    except subprocess.TimeoutExpired:
        for pid in (*everything, *descendants(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def log(config: TrainConfig) -> str:
    """Return the output of the entrypoint and the ranks, over all starts."""
    return config.run.with_suffix(".log").read_text()


def process_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(process_fields(pid)[1])


def has_ended(pid: int) -> bool:
    """Return True if a process is gone, or is a zombie that waits for its parent."""
    return not (fields := process_fields(pid)) or fields[0] in "ZX"


def all_ended(pids: list[int]) -> bool:
    """Return True if none of these processes runs."""
    return all(map(has_ended, pids))


def children(pid: int) -> list[int]:
    """Return the running processes that a process has started."""
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [each for each in running if (fields := process_fields(each)) and int(fields[1]) == pid and fields[0] not in "ZX"]


def descendants(pid: int) -> list[int]:
    """Return all processes below a process."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def launcher_of(entrypoint: int) -> int | None:
    """Return the process of torchrun below an entrypoint, or None if it does not run."""
    return next((child for child in children(entrypoint) if b"launch.torchrun" in command_line(child)), None)


def ranks_of(entrypoint: int) -> list[int]:
    """Return the running processes of the ranks below an entrypoint."""
    launcher = launcher_of(entrypoint)
    return [] if launcher is None else [child for child in children(launcher) if b"trainer\0train" in command_line(child)]


def pids_of(config: TrainConfig) -> list[int]:
    """Return the processes of the ranks, as named by their heartbeats."""
    beats = [Heartbeat.from_bytes((config.run / f"heartbeat/rank-{rank}").read_bytes()) for rank in range(2)]
    return [beat.pid for beat in beats if beat is not None]


def seconds_until(condition: Callable[[], object], timeout_s: float) -> float:
    """Wait until a condition is true, and return the seconds that it took. Fails after `timeout_s`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + timeout_s, f"the condition was still false after {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - begun


def command_line(pid: int) -> bytes:
    """Return the command line of a process, with a NUL after each word. Empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
