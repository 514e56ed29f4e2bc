"""Runs the commands of `data_pipeline` as a user does, kills them, and looks at what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.dataset.manifest import verify

__all__ = ["FinishedWork", "bytes_done_before", "content_of", "kill_at_random", "run", "start", "timed_run"]

ROOT = Path(__file__).resolve().parents[2]
_NOT_DIGESTED = (".prepare.lock", "inputs.json", "published.json", "timings.json", "report.html")
"""What a folder holds besides the reproducible output: this machine's matters, and a page that shows times."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What a command of `data_pipeline` says and how it ends."""
    return subprocess.run(_command(arguments), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """A command of `data_pipeline` in a process group of its own, which it leads."""
    return subprocess.Popen(
        _command(arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "data_pipeline", *map(str, arguments)]


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file of prepared data that is the same wherever and however it was made, after a look at its digests."""
    verify(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in _NOT_DIGESTED}


def timed_run(arguments: tuple[str | Path, ...], output: Path) -> float:
    """How many seconds an undisturbed preparation takes from nothing."""
    begin = time.monotonic()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert (output / "manifest.json").is_file()
    return time.monotonic() - begin


def kill_at_random(
    arguments: tuple[str | Path, ...], output: Path, delays: random.Random, longest_s: float, *, at_work: bool = False
) -> bool:
    """Kills a preparation and all of its processes after up to `longest_s`; false where it had come to its end before.

    With `at_work` the time counts from the moment at which a task has finished, not from the start of the process.
    A folder that is already prepared is emptied first, so that there is something to kill.
    """
    if (output / "manifest.json").exists():
        shutil.rmtree(output)
    process = start(*arguments)
    while at_work and process.poll() is None and not finished_results(output):
        time.sleep(0.005)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delays.uniform(0, longest_s))
    was_running = process.poll() is None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return was_running


def finished_results(output: Path) -> list[Path]:
    """What the finished tasks of a preparation that has not ended wrote about themselves."""
    results = output.glob(".work/*/*/*.json")
    return [path for path in results if path.parent.name not in ("final", "outgoing", "tokenizer")]


class FinishedWork:
    """The results of finished tasks in the work of a preparation, which no later run may write again."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}

    def check(self, output: Path) -> int:
        """Takes note of what is finished now; what was finished before must be the same files. Returns how many files that are.

        Once data is published there is nothing to go on with, and the work goes.
        """
        if (output / "manifest.json").exists():
            self._seen = {}
            return 0
        now = {path: _identity(path) for path in finished_results(output)}
        tables = {path.with_suffix(".arrow") for path in now}
        now |= {path: _identity(path) for path in tables if path.exists()}
        redone = [str(path) for path in now.keys() & self._seen.keys() if now[path] != self._seen[path]]
        assert not redone, f"done again: {redone}"
        assert self._seen.keys() <= now.keys(), f"lost: {self._seen.keys() - now.keys()}"
        self._seen = now
        return len(now)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def bytes_done_before(output: Path) -> Mapping[str, tuple[int, int]]:
    """For each stage of the run that finished, the bytes that it did and those that earlier runs had done."""
    stages: list[dict[str, Any]] = json.loads((output / "timings.json").read_bytes())["stages"]
    return {stage["name"]: (stage["bytes"], stage["bytes_done_before"]) for stage in stages}
