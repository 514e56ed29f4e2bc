"""`make demo` without containers: the time of the whole training, and the bits per byte at its end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.bench import Bench, step_of_trainer
from tests.benchmarks.harness import OWN, Comparison, Contestant, Sample, run_program
from tests.support.runs import metrics


def comparisons(bench: Bench) -> Iterator[Comparison]:
    contestants: dict[str, Contestant] = {OWN: partial(train, bench)}
    yield Comparison("demo", "The training of make demo, one rank", "s", contestants, OWN, goal="1.30 bits per byte", rounds=1)


def train(bench: Bench, folder: Path) -> Sample:
    words = ("--recipe", "demo", "--data", bench.demo_rows, "--run", folder / "run", "--device", "cpu")
    watched = run_program("trainer", "train", *words, step_of=step_of_trainer)
    last = metrics(folder / "run", "eval")[-1]
    facts = {"steps": last["step"], "bits per byte": round(last["bits_per_byte"], 4)}
    return Sample(watched.wall_s, watched.cpu_s, watched.load, facts)
