"""The time to start and to end: CPU time and wall time of whole processes, one thread, fp32.

The first step is that of the recipe `smoke`. It is compared with `import torch`, which every program with torch has to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.benchmarks.bench import NANOGPT, PEERS_COMMAND, Bench, flags, step_of_trainer, write_characters
from tests.benchmarks.harness import OWN, Comparison, Contestant, Sample, Watched, watch
from tests.benchmarks.steps import SHAKESPEARE, num_threads

TRAINER = (sys.executable, "-m", "trainer")
TORCH = "import torch"
IMPORT_TRAINER = "from transformers import Trainer, TrainingArguments"


def comparisons(bench: Bench) -> Iterator[Comparison]:
    rounds = 1 if bench.quick else 5
    models, lightning = bench.peer("models", "transformers"), bench.peer("litgpt", "litgpt")
    litgpt: Contestant = partial(whole, (lightning, "-m", "litgpt", "--help")) if lightning else PEERS_COMMAND
    imported: Contestant = partial(whole, (models, "-c", IMPORT_TRAINER)) if models else PEERS_COMMAND
    nothing_needed: dict[str, Contestant] = {f"{OWN} --help": partial(whole, (*TRAINER, "--help")), "litgpt --help": litgpt}
    yield Comparison("start-help", "The text of --help", "s", nothing_needed, "litgpt --help", rounds=rounds)
    nothing_to_do: dict[str, Contestant] = {OWN: partial(finished, bench), TORCH: import_torch()}
    yield Comparison("start-nothing", "A run that has nothing to do", "s", nothing_to_do, TORCH, rounds=rounds)
    first: dict[str, Contestant] = {
        f"{OWN}, smoke": partial(first_step, bench),
        TORCH: import_torch(),
        "import of transformers' Trainer": imported,
        "nanoGPT": partial(nanogpt, bench, "first") if bench.nanogpt else NANOGPT,
    }
    goal = "2 s of CPU time after the import of torch"
    yield Comparison(
        "start-step", "From the start to the end of the first step, one thread", "s", first, "nanoGPT", goal=goal, rounds=rounds
    )
    ends: dict[str, Contestant] = {
        f"{OWN}, smoke": partial(ending, bench),
        "nanoGPT": partial(nanogpt, bench, "end") if bench.nanogpt else NANOGPT,
    }
    yield Comparison("end", "From the last line to the end of the process", "s", ends, "nanoGPT", goal="at most 1 s", rounds=rounds)


def import_torch() -> Contestant:
    return partial(whole, (sys.executable, "-c", TORCH))


def whole(command: Sequence[str | Path], _: Path) -> Sample:
    watched = watch(command, env=num_threads(1))
    return Sample(watched.wall_s, watched.cpu_s, watched.load)


def smoke(bench: Bench, run: Path, **settings: object) -> Sequence[str]:
    data = bench.prepare("smoke", "--recipe", "smoke")
    fixed = {"recipe": "smoke", "data": data, "run": run, "device": "cpu", "precision": "fp32", "threads": 1}
    return (*TRAINER, "train", *flags(fixed | settings))


def first_step(bench: Bench, folder: Path) -> Sample:
    command = smoke(bench, folder / "run", **{"log.every_steps": 1})
    ended = watch(command, env=num_threads(1), step_of=step_of_trainer, until=lambda line: step_of_trainer(line) == 1)
    return until_first_step(ended)


def until_first_step(watched: Watched) -> Sample:
    return Sample(watched.steps[1], watched.cpu_at[1], watched.load)


def finished(bench: Bench, folder: Path) -> Sample:
    run = bench.folder / "finished"
    command = smoke(bench, run, **{"limits.steps": 2, "schedule.warmup_steps": 1})
    if not run.exists():
        watch(command, env=num_threads(1))
    watched = watch(command, env=num_threads(1))
    return Sample(watched.wall_s, watched.cpu_s, watched.load, {"steps": len(watched.steps)})


def ending(bench: Bench, folder: Path) -> Sample:
    watched = watch(smoke(bench, folder / "run"), env=num_threads(1), step_of=step_of_trainer)
    return Sample(watched.wall_s - watched.last_line_s, None, watched.load)


def nanogpt(bench: Bench, which: str, folder: Path) -> Sample:
    stream, vocab = write_characters(bench.characters, folder)
    options = SHAKESPEARE | {"max_iters": 5, "eval_interval": 1_000_000, "eval_iters": 1}
    watched = bench.train_nanogpt(folder, stream, vocab, options, env=num_threads(1))
    if which == "first":
        return until_first_step(watched)
    return Sample(watched.wall_s - watched.last_line_s, None, watched.load)
