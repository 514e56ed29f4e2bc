"""Looks at the heartbeats of a run: exit code 0 and one line where a rank has beaten lately, else 1. See `entrypoints/healthcheck`.

Only ranks count that are running in this container; see `trainer.run.running_ranks`. While there is none, the check fails, which
Docker shows as "starting" for the service's `start_period`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from trainer.run.running_ranks import ranks_of

__all__ = ["main"]


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
    ranks = ranks_of(Path(run))
    running = [rank for rank in ranks if not rank.absence]
    if not running:
        left = f" (rank {ranks[0].number}: {ranks[0].absence})" if ranks else ""
        say(f"starting: no rank of {run} is running in this container yet{left}")
        return 1
    newest = max(running, key=lambda rank: rank.beaten_s)
    age_s = int(time.time() - newest.beaten_s)
    doing = f", in phase {newest.beat.phase} of step {newest.beat.step}" if newest.beat else ""
    say(f"last heartbeat {age_s} s ago (at most {limit} s is healthy){doing}")
    return 0 if age_s <= int(limit) else 1


if __name__ == "__main__":
    sys.exit(main())
