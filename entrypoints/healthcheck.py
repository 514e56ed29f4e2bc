"""Checks the heartbeats of a run: exit code 0 if a rank has written one lately, else 1. Prints one line.

Only ranks that are running in this container count; see `trainer.machine.running_ranks`. While there are none, the check fails,
which Docker shows as "starting" during the service's `start_period`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from trainer.launch.command import folder_of
from trainer.machine.running_ranks import ranks_of


def log_line(line: str) -> None:
    """Print a line, which Docker keeps as the result of the check."""
    sys.stdout.write(f"{line}\n")


def run_of_the_launcher(proc: Path = Path("/proc")) -> str:
    """Return the option --run of the launcher that runs in this container; empty if there is none."""
    for path in proc.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="surrogateescape").split("\0")
        except OSError:  # it has ended, or belongs to another user
            continue
        if "trainer.launch" in words and (run := folder_of("run", words, {})):
            return run
    return ""


def main() -> int:
    """Print the age of the newest heartbeat and return the exit code."""
    limit = os.environ.get("HEARTBEAT_MAX_AGE_S") or "300"
    if not limit.isdecimal():
        log_line(f"healthcheck: HEARTBEAT_MAX_AGE_S = {limit!r} must be a number of seconds")
        return 1
    run = os.environ.get("TRAIN_RUN") or run_of_the_launcher()
    if not run:
        log_line("no training was started in this container")
        return 0
    ranks = ranks_of(Path(run))
    running = [rank for rank in ranks if not rank.absence]
    if not running:
        left = f" (rank {ranks[0].number}: {ranks[0].absence})" if ranks else ""
        log_line(f"starting: no rank of {run} is running in this container yet{left}")
        return 1
    newest = max(running, key=lambda rank: rank.beaten_s)
    age_s = int(time.time() - newest.beaten_s)
    doing = f", in phase {newest.beat.phase} of step {newest.beat.step}" if newest.beat else ""
    log_line(f"last heartbeat {age_s} s ago (at most {limit} s is healthy){doing}")
    return 0 if age_s <= int(limit) else 1


if __name__ == "__main__":
    sys.exit(main())
