"""Profiles of a few steps: a trace of the operations, and on a GPU a snapshot of its memory.

Each rank writes `profile/rank-N-steps-A-B.json` into the run, a Chrome trace for ui.perfetto.dev, and on a GPU
`….pickle`, which pytorch.org/memory_viz shows. This program never reads them. The profiler watches and changes no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.files import UnusableFileError, own_folder, unfinished_path
from trainer.config.run import step_range

_log = logging.getLogger(__name__)

FOLDER = "profile"  # the folder of the profiles in a run
_MAX_EVENTS = 200_000  # most allocations and releases in a snapshot


class StepProfiler:
    def __init__(self, run: Path, steps: str | None, rank: int, device: torch.device) -> None:
        self._folder = run / FOLDER
        self._range = None if steps is None else step_range(steps)
        self._rank = rank
        self._on_gpu = device.type == "cuda"
        self._profile: profile | None = None
        self._first = self._last = 0

    def before_step(self, step: int) -> None:
        """Begin to record if `step` is one of the steps. Call this before its rows are read."""
        if self._profile is not None or self._range is None or not self._range[0] <= step <= self._range[1]:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._first = self._last = step
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.memory._record_memory_history(max_entries=_MAX_EVENTS)
        self._profile = profile(activities=activities, record_shapes=True, acc_events=True)
        self._profile.start()

    def after_step(self, step: int) -> None:
        if self._profile is None:
            return
        self._last = step
        if self._range is not None and step >= self._range[1]:
            self.close()

    def close(self) -> None:
        recorded, waited_for = self._profile, self._range
        self._profile = self._range = None
        if recorded is None:
            if waited_for is not None and self._rank == 0:
                _log.warning("log.profile_steps = %d..%d: none of these steps was trained, so there is no profile", *waited_for)
            return
        if self._on_gpu:
            torch.cuda.synchronize()
        recorded.stop()
        path = self._folder / f"rank-{self._rank}-steps-{self._first}-{self._last}.json"
        try:
            own_folder(self._folder)
            _write(path, lambda name: recorded.export_chrome_trace(str(name)))
            if self._on_gpu:
                dump: Callable[[str], None] = torch.cuda.memory._dump_snapshot
                _write(path.with_suffix(".pickle"), lambda name: dump(str(name)))
            _log.info("profile of steps %d to %d in %s", self._first, self._last, path)
        except (OSError, RuntimeError, UnusableFileError) as error:
            _log.warning("the profile of steps %d to %d was not written: %s", self._first, self._last, error)
        finally:
            if self._on_gpu:
                torch.cuda.memory._record_memory_history(enabled=None)


def _write(path: Path, export: Callable[[Path], object]) -> None:
    temporary = unfinished_path(path)
    try:
        export(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
