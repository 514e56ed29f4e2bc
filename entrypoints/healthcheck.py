"""Looks at the heartbeats of a run: exit code 0 and one line where a rank has beaten lately, else 1. See `entrypoints/healthcheck`.

The run's folder may come from a stranger: only file names that a rank would choose count, and a file is read as data alone.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

from data_pipeline.files import UnusableFileError, open_input
from trainer.watchdog import Beat

MAX_BEAT_BYTES = 4096

__all__ = ["main", "newest_beat"]


def newest_beat(run: Path) -> tuple[float, Beat | None] | None:
    """When a rank of the run has beaten last, in seconds since 1970, and what it was doing; None where none has."""
    found = []
    try:
        paths = [path for path in (run / "heartbeat").iterdir() if re.fullmatch(r"rank-[0-9]{1,9}", path.name)]
    except OSError:
        return None
    for path in paths:
        try:
            with open_input(path, below=run) as file:
                found.append((os.fstat(file.fileno()).st_mtime, Beat.from_bytes(file.read(MAX_BEAT_BYTES))))
        except (OSError, UnusableFileError):
            continue
    return max(found, key=lambda each: each[0], default=None)


def say(line: str) -> None:
    """Prints a line, which Docker keeps as the outcome of the check."""
    sys.stdout.write(f"{line}\n")


def main() -> int:
    """Prints how old the newest heartbeat is; the exit code."""
    run = os.environ.get("TRAIN_RUN")
    limit = os.environ.get("HEARTBEAT_MAX_AGE_S") or "300"
    if not run or not limit.isdecimal():
        say(f"healthcheck: TRAIN_RUN = {run!r} must name the run directory, HEARTBEAT_MAX_AGE_S = {limit!r} whole seconds")
        return 1
    newest = newest_beat(Path(run))
    if newest is None:
        say(f"no heartbeat in {run}/heartbeat yet")
        return 1
    seen_s, beat = newest
    age_s = int(time.time() - seen_s)
    doing = f", in phase {beat.phase} of step {beat.step}" if beat else ""
    say(f"last heartbeat {age_s} s ago (at most {limit} s is healthy){doing}")
    return 0 if age_s <= int(limit) else 1


if __name__ == "__main__":
    sys.exit(main())
