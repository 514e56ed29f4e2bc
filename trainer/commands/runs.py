from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, open_input
from common.settings.model import Options, Place
from common.text import visible
from trainer.runs.layout import METRICS, RECORD

_DEPTH = 4  # The most folders between the given one and a run. The name of a run can have several parts.


class RunsOptions(Options):
    """Lists the runs in a folder and in its subfolders, the one that changed last first."""

    folder: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(
        Path("workspace/runs"), description="Folder that holds the runs."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object for each run, one on each line.")


def run(options: RunsOptions) -> None:
    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder; name the folder that holds your runs")
    runs = listed_runs(options.folder)
    if not runs:
        raise ConfigError(f"{options.folder} holds no run; `trainer train --run {options.folder}/NAME` starts one")
    if options.as_json:
        for one in runs:
            changed = one.changed.astimezone(UTC).isoformat(timespec="seconds")
            facts = {"run": one.name, "state": one.state, "step": one.step, "val_loss": one.val_loss, "changed": changed}
            print(json.dumps(facts))
        return
    width = max(len("run"), *(len(visible(one.name)) for one in runs))
    print(f"{'run':<{width}}  {'state':<9} {'steps':>9}  {'validation loss':>15}  last change")
    for one in runs:
        loss = "-" if one.val_loss is None else f"{one.val_loss:.4f}"
        print(f"{visible(one.name):<{width}}  {one.state:<9} {one.step:>9,}  {loss:>15}  {one.changed:%Y-%m-%d %H:%M}")


@dataclass(frozen=True)
class ListedRun:
    name: str  # its path below the folder that was searched
    state: str  # `training`, `finished`, `stopped`, `failed`, `killed`, or `damaged` if a file of it cannot be read
    step: int
    val_loss: float | None  # the last validation loss in nats per token, None before the first evaluation
    changed: datetime


def listed_runs(folder: Path) -> list[ListedRun]:
    """Return the runs below a folder, or the folder itself if it is a run; the one that changed last comes first."""
    from trainer.report.recorded_run import read_run

    found = []
    for path in _runs_below(folder, _DEPTH):
        newest = max(file.stat().st_mtime for name in (RECORD, METRICS) if (file := path / name).exists())
        changed = datetime.fromtimestamp(newest).astimezone()
        name = path.resolve().name if path == folder else str(path.relative_to(folder))
        try:
            run = read_run(path)
            is_killed = run.record.status == "training" and not _is_locked(path)
        except (CheckpointError, UnusableFileError, OSError):
            found.append(ListedRun(name, "damaged", 0, None, changed))
            continue
        last = run.evaluations[-1].val_loss if run.evaluations else None
        found.append(ListedRun(name, "killed" if is_killed else run.record.status, run.step, last, changed))
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
