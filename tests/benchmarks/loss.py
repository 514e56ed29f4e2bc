"""The time from the start of a process to a validation loss of 1.88, on tinyshakespeare with nanoGPT's CPU settings.

nanoGPT measures its loss itself: every 250 steps its train.py takes the mean of 20 random batches, which also gave the published
1.88. If it ends above 1.88, the time until its last evaluation counts. The loss of this project is the mean over all validation
rows, with as many tokens of context, and must reach 1.88. Each round has another seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from tests.benchmarks.bench import NANOGPT, Bench, write_characters
from tests.benchmarks.harness import OWN, Comparison, Contestant, ContestantError, Sample, Watched
from tests.benchmarks.steps import SHAKESPEARE

GOAL = 1.88
ROUNDS = 5
TEXT = "--shakespeare input.txt (github.com/karpathy/char-rnn, data/tinyshakespeare)"
NANOGPT_SCHEDULE = {"max_iters": 2000, "lr_decay_iters": 2000, "eval_interval": 250, "eval_iters": 20}
NANOGPT_OPTIM = {"learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100}
RECIPE = {
    "recipe": "shakespeare-char",
    "optim.kind": "muon",
    "optim.lr": 1e-2,
    "optim.muon_lr": 2e-2,
    "schedule.kind": "linear",
    "schedule.min_lr_ratio": 0,
    "schedule.warmup_steps": 10,
    "limits.steps": 340,
    "eval.every_steps": 340,
    "eval.sample_tokens": 0,
}
"""The quickest that was found: AdamW needs 720 steps, and Muon with three times the rates or twice the weights ends higher."""
LOSS_OF_OWN, LOSS_OF_PEER = r"step (\d+)  validation loss ([\d.]+)", r"step (\d+): train loss [\d.]+, val loss ([\d.]+)"
"""The lines with the step and the loss of validation."""


def comparisons(bench: Bench) -> Iterator[Comparison]:
    contestants: dict[str, Contestant] = {OWN: in_rounds(bench, own) if bench.shakespeare else TEXT}
    peer = in_rounds(bench, nanogpt) if bench.nanogpt else NANOGPT
    contestants["nanoGPT"] = peer if bench.shakespeare else TEXT
    title = f"From the start to a validation loss of {GOAL}, tinyshakespeare"
    yield Comparison("loss", title, "s", contestants, "nanoGPT", goal="3.0 times as fast as nanoGPT", rounds=ROUNDS)


def in_rounds(bench: Bench, run: Callable[[Bench, int, Path], Sample]) -> Contestant:
    """Return a contestant that trains with another seed in each round."""
    seeds = count(1337)
    return lambda folder: run(bench, next(seeds), folder)


def own(bench: Bench, seed: int, folder: Path) -> Sample:
    settings = RECIPE | {"data": bench.character_rows, "device": "cpu", "seed": seed}
    found = sample(bench.train(folder / "run", settings, until=lambda line: reached(line, LOSS_OF_OWN)), LOSS_OF_OWN, seed)
    if found.facts["loss"] > GOAL:
        raise ContestantError(f"the loss did not reach {GOAL}: {found.facts}")
    return found


def nanogpt(bench: Bench, seed: int, folder: Path) -> Sample:
    stream, vocab = write_characters(bench.characters, folder)
    options = SHAKESPEARE | NANOGPT_SCHEDULE | NANOGPT_OPTIM
    watched = bench.train_nanogpt(folder, stream, vocab, options, seed=seed, until=lambda line: reached(line, LOSS_OF_PEER))
    return sample(watched, LOSS_OF_PEER, seed)


def reached(line: str, pattern: str) -> bool:
    found = re.search(pattern, line)
    return found is not None and float(found[2]) <= GOAL


def sample(watched: Watched, pattern: str, seed: int) -> Sample:
    """Return the seconds until the last evaluation. It is the last line if it reached the goal, because that ends the process."""
    evaluations = [found for line in watched.lines if (found := re.search(pattern, line))]
    if not evaluations:
        raise ContestantError(f"there was no evaluation in {watched.wall_s:.0f} s")
    last = evaluations[-1]
    return Sample(watched.last_line_s, watched.cpu_s, watched.load, {"steps": int(last[1]), "loss": float(last[2]), "seed": seed})
