"""Measures the cost of monitoring a run: recipe `demo`, one rank, on a CPU.

    python -m tests.benchmarks.monitoring [--steps 160]

One run computes norms by layer in every second step and histograms in every fourth. Steps with and without them alternate, so other
load on the machine affects both. The run records the time of its sinks (`monitor_s`, which is part of the duration of the next
step). The share at the end is that of a run with the default intervals.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.support.runs import ROOT, metrics
from trainer.config import LogConfig

WARM_UP = 8
MEASURED = {"--log.layers_every_steps": "2", "--log.histograms_every_steps": "4", "--log.report": "off", "--device": "cpu"}
LEFT_OUT = {"--eval.every_steps": "100000", "--eval.sample_tokens": "0", "--checkpoint.every_steps": "100000"}


def events_of_a_run(num_steps: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        prepare = ["data_pipeline", "prepare", "--recipe", "demo", "--output", str(data)]
        train = ["trainer", "train", "--recipe", "demo", "--data", str(data), "--run", str(run), "--limits.steps", str(num_steps)]
        train += [word for flag in (MEASURED | LEFT_OUT).items() for word in flag]
        for command in (prepare, train):
            subprocess.run(
                [sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        return metrics(run, "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    events = events_of_a_run(parser.parse_args().steps)
    step_ms: dict[int, list[float]] = {due: [] for due in range(4)}
    sinks_ms: dict[int, list[float]] = {due: [] for due in range(4)}
    for event, after in zip(events[WARM_UP:-1], events[WARM_UP + 1 :], strict=True):
        step_ms[event["step"] % 4].append(1e3 * (event["seconds"] - event["monitor_s"]))
        sinks_ms[event["step"] % 4].append(1e3 * after["monitor_s"])
    plain_ms, plain_sinks_ms = median(step_ms[1] + step_ms[3]), median(sinks_ms[1] + sinks_ms[3])
    print(f"a step takes {plain_ms:.1f} ms, the sinks take {plain_sinks_ms:.3f} ms")
    total_ms = plain_sinks_ms
    intervals = LogConfig()
    for name, due, every in (
        ("norms by layer", 2, intervals.layers_every_steps),
        ("norms and histograms", 0, intervals.histograms_every_steps),
    ):
        more_ms, more_sinks_ms = median(step_ms[due]) - plain_ms, median(sinks_ms[due]) - plain_sinks_ms
        print(f"{name}: {more_ms:+.1f} ms in the step, {more_sinks_ms:+.2f} ms in the sinks; default interval: {every} steps")
        total_ms += (more_ms + more_sinks_ms) / every
    print(f"total: {total_ms / plain_ms:.3%} of the time of a step")


if __name__ == "__main__":
    main()
