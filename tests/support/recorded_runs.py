"""Adds what the guard and the alert rules read in a training to `tests/golden/healthy_runs.jsonl`.

    python -m tests.support.recorded_runs NAME --data … --run … [settings of train]
    torchrun --nproc-per-node 2 -m -- tests.support.recorded_runs NAME --data … --run … [settings of train]

`tests/unit/trainer/health/test_healthy_runs.py` replays the file.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.__main__ import start
from trainer.distributed.stragglers import OwnTime, StragglerDetector
from trainer.health.alert_rules import AlertRules
from trainer.health.guard import Guard
from trainer.machine.sampler import HardwareReading
from trainer.watchdog.processes import LAUNCHER_VARIABLE

FILE = Path(__file__).parents[1] / "golden/healthy_runs.jsonl"


def main(name: str, arguments: Sequence[str]) -> None:
    """Train with these arguments, and add what the rules of rank 0 read."""
    record: dict[str, Any] = {"name": name, "steps": [], "losses": [], "readings": [], "own": []}

    def step(number: int, *, seconds: float | None, waited_s: float, tokens_per_s: float) -> None:
        record["steps"].append([number, *map(_short, (seconds, waited_s, tokens_per_s))])

    def reading(number: int, reading: HardwareReading) -> None:
        record["readings"].append([number, round(reading.host.private_mib), round(reading.host.available_mib)])

    def own(times: Sequence[OwnTime], step_s: float) -> None:
        record["own"].append([_short(step_s), *([_short(one.seconds), _short(one.data_s)] for one in times)])

    def judged(number: int, loss: float, grad_norm: float) -> None:
        record["losses"].append([number, _short(loss), _short(grad_norm)])

    _also(AlertRules, "after_step", step)
    _also(AlertRules, "after_reading", reading)
    _also(StragglerDetector, "observe", own)
    _also(Guard, "judge", judged)
    if os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: _append(record))
    if "RANK" in os.environ:
        os.environ[LAUNCHER_VARIABLE] = str(os.getppid())
    start(["train", *arguments])


def _also(owner: type, name: str, note: Callable[..., None]) -> None:
    """Call `note` with the arguments of a method before each of its calls."""
    method = getattr(owner, name)

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return method(self, *arguments, **named)

    setattr(owner, name, noted)


def _append(record: dict[str, Any]) -> None:
    with FILE.open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _short(value: float | None) -> float | None:
    """Return a number with four digits."""
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
