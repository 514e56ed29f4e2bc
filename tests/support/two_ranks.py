"""A training of two ranks under `entrypoints/train`, as a person or a scheduler would start it, and its processes."""

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
from trainer.watchdog.beat import Beat

__all__ = [
    "all_ended",
    "command_line",
    "descendants",
    "launcher_of",
    "log",
    "parent_of",
    "pids_of",
    "ranks_of",
    "seconds_until",
    "start_entrypoint",
    "started",
]


def start_entrypoint(config: TrainConfig, **environment: str) -> subprocess.Popen[bytes]:
    """The entrypoint with two ranks, which it starts again at once; its output goes to `<run>.log` beside the run."""
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
    """The same, ended at the end."""
    process = start_entrypoint(config, **environment)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Has the entrypoint stop, and kills all that is left of it where it does not."""
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
    """What the entrypoint and the ranks have printed, over all starts."""
    return config.run.with_suffix(".log").read_text()


def process_fields(pid: int) -> list[str]:
    """What the kernel knows of a process from its state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """The process that started another."""
    return int(process_fields(pid)[1])


def has_ended(pid: int) -> bool:
    """True where a process is gone, or only waits for its parent to notice."""
    return not (fields := process_fields(pid)) or fields[0] in "ZX"


def all_ended(pids: list[int]) -> bool:
    """True once none of these processes runs any more."""
    return all(map(has_ended, pids))


def children(pid: int) -> list[int]:
    """The processes that a process has started and that run still."""
    running = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [each for each in running if (fields := process_fields(each)) and int(fields[1]) == pid and fields[0] not in "ZX"]


def descendants(pid: int) -> list[int]:
    """The processes below a process."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def launcher_of(entrypoint: int) -> int | None:
    """The process of torchrun below an entrypoint, if it runs."""
    return next((child for child in children(entrypoint) if b"torchrun.py" in command_line(child)), None)


def ranks_of(entrypoint: int) -> list[int]:
    """The processes of the ranks below an entrypoint, as far as they run."""
    launcher = launcher_of(entrypoint)
    return [] if launcher is None else [child for child in children(launcher) if b"trainer\0train" in command_line(child)]


def pids_of(config: TrainConfig) -> list[int]:
    """The processes of the ranks, as their heartbeats name them."""
    beats = [Beat.from_bytes((config.run / f"heartbeat/rank-{rank}").read_bytes()) for rank in range(2)]
    return [beat.pid for beat in beats if beat is not None]


def seconds_until(condition: Callable[[], object], timeout_s: float) -> float:
    """How long it took; fails where it took too long."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + timeout_s, f"not in {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - begun


def command_line(pid: int) -> bytes:
    """The words of a process, each with a NUL behind it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
