"""Finds the runs in a folder, and says of each what its files tell without its tensors."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import UnusableFileError, open_input
from trainer.report.recorded_run import read_run
from trainer.runs.layout import METRICS, RECORD

_DEPTH = 4  # The most folders between the given one and a run. The name of a run can have several parts.


@dataclass(frozen=True)
class ListedRun:
    name: str  # its path below the folder that was searched
    state: str  # `training`, `finished`, `stopped`, `failed`, `killed`, or `damaged` if a file of it cannot be read
    step: int
    val_loss: float | None  # the last validation loss in nats per token, None before the first evaluation
    changed: datetime

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.name,
            "state": self.state,
            "step": self.step,
            "val_loss": self.val_loss,
            "changed": self.changed.astimezone(UTC).isoformat(timespec="seconds"),
        }


def listed_runs(folder: Path) -> list[ListedRun]:
    """Return the runs below a folder, or the folder itself if it is a run; the one that changed last comes first."""
    found = [_listed(path, folder) for path in _runs_below(folder, _DEPTH)]
    return sorted(found, key=lambda listed: (listed.changed, listed.name), reverse=True)


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / RECORD).is_file():
        yield folder
        return
    if depth:
        with suppress(PermissionError):
            for path in sorted(folder.iterdir()):
                if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                    yield from _runs_below(path, depth - 1)


def _listed(path: Path, below: Path) -> ListedRun:
    newest = max(file.stat().st_mtime for name in (RECORD, METRICS) if (file := path / name).exists())
    changed = datetime.fromtimestamp(newest).astimezone()
    name = path.resolve().name if path == below else str(path.relative_to(below))
    try:
        run = read_run(path)
        state = run.record.status
        if state == "training" and not _is_locked(path):
            state = "killed"
    except (CheckpointError, UnusableFileError, OSError):
        return ListedRun(name, "damaged", 0, None, changed)
    last = run.evaluations[-1].val_loss if run.evaluations else None
    return ListedRun(name, state, run.step, last, changed)


def _is_locked(run: Path) -> bool:
    """Return whether a process trains here. A run on another machine counts as training if its folder cannot tell."""
    try:
        with open_input(run / ".lock", below=run) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
