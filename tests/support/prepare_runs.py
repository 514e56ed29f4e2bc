"""Runs the commands of `data_pipeline` as a user does, kills them, and reads the files that they leave."""

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

ROOT = Path(__file__).resolve().parents[2]
_NOT_DIGESTED = (".prepare.lock", "inputs.json", "published.json", "timings.json", "report.html")
"""Files that are not part of the reproducible output: facts about this machine, and a page that shows times."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of `data_pipeline` to its end, with its output captured."""
    return subprocess.run(_command(arguments), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def start(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start a command of `data_pipeline` as the leader of a new process group."""
    return subprocess.Popen(
        _command(arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _command(arguments: tuple[str | Path, ...]) -> list[str]:
    return [sys.executable, "-m", "data_pipeline", *map(str, arguments)]


def content_of(folder: Path) -> dict[str, bytes]:
    """Check the digests of prepared data, and return every file that does not depend on where and how the data was made."""
    verify(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in _NOT_DIGESTED}


def timed_run(arguments: tuple[str | Path, ...], output: Path) -> float:
    """Return how many seconds a complete preparation takes without interruption."""
    begin = time.monotonic()
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    assert (output / "manifest.json").is_file()
    return time.monotonic() - begin


def kill_at_random(
    arguments: tuple[str | Path, ...], output: Path, delays: random.Random, longest_s: float, *, at_work: bool = False
) -> bool:
    """Kill all processes of a preparation after up to `longest_s` seconds. Returns False if it had already ended.

    With `at_work` the time counts from the first finished task, not from the start of the process.
    If the folder is already prepared, it is deleted first, so that there is work to interrupt.
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
    """Return the result files of the finished tasks of a preparation that has not ended."""
    results = output.glob(".work/*/*/*.json")
    return [path for path in results if path.parent.name not in ("final", "outgoing", "tokenizer")]


class FinishedWork:
    """The results of finished tasks of a preparation. No later run may write them again."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, int]] = {}

    def check(self, output: Path) -> int:
        """Record the files of finished tasks and check that earlier ones are unchanged. Returns their number.

        After the data is published, the work is gone and nothing is checked.
        """
        if (output / "manifest.json").exists():
            self._seen = {}
            return 0
        now = {path: _identity(path) for path in finished_results(output)}
        tables = {path.with_suffix(".arrow") for path in now}
        now |= {path: _identity(path) for path in tables if path.exists()}
        redone = [str(path) for path in now.keys() & self._seen.keys() if now[path] != self._seen[path]]
        assert not redone, f"finished work was done again: {redone}"
        assert self._seen.keys() <= now.keys(), f"finished work was lost: {self._seen.keys() - now.keys()}"
        self._seen = now
        return len(now)


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def bytes_done_before(output: Path) -> Mapping[str, tuple[int, int]]:
    """For each stage of the run that finished: the bytes that it processed and the bytes that earlier runs had processed."""
    stages: list[dict[str, Any]] = json.loads((output / "timings.json").read_bytes())["stages"]
    return {stage["name"]: (stage["bytes"], stage["bytes_done_before"]) for stage in stages}
