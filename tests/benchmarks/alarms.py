"""Counts the alarms of the guard in simulated losses: false alarms by kind of noise, and the share of planted faults that it finds.

    python -m tests.benchmarks.alarms [--runs 3]

Each run has 20,000 steps at a level of 3 nats. Planted faults: one loss that is higher by 0.6 nats, after 150
or 1,000 steps of noise; a loss ten times as high, and a climb by 7 nats over 1,000 steps, after 300 steps. The table is part of
docs/monitoring.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.config import GuardConfig
from trainer.health.guard import Guard

LEVEL = 3.0
STEPS = 20_000
FAULT_RUNS = 20
"""Runs for each kind of fault, per run of the table."""

Losses = NDArray[np.float64]


def normal(rng: np.random.Generator, num_steps: int) -> Losses:
    """Return independent noise with the standard deviation 1, as all functions here."""
    return rng.standard_normal(num_steps)


def student(rng: np.random.Generator, num_steps: int) -> Losses:
    """Return heavy-tailed noise: Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, num_steps) / np.sqrt(3)


def log_normal(rng: np.random.Generator, num_steps: int) -> Losses:
    """Return skewed noise: log-normal with sigma 1."""
    return (rng.lognormal(0, 1, num_steps) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


def correlated(rng: np.random.Generator, num_steps: int, factor: float = 0.95) -> Losses:
    noise = rng.standard_normal(num_steps)
    for step in range(1, num_steps):
        noise[step] = factor * noise[step - 1] + np.sqrt(1 - factor**2) * noise[step]
    return noise


NOISES: dict[str, tuple[Callable[[np.random.Generator, int], Losses], float]] = {
    "normal, sd 0.1": (normal, 0.1),
    "normal, sd 0.25": (normal, 0.25),
    "AR(1) 0.95, sd 0.1": (correlated, 0.1),
    "AR(1) 0.95, sd 0.25": (correlated, 0.25),
    "log-normal, sd 0.1": (log_normal, 0.1),
    "log-normal, sd 0.25": (log_normal, 0.25),
    "Student t(3), sd 0.1": (student, 0.1),
    "Student t(3), sd 0.25": (student, 0.25),
}


def alarms(losses: Sequence[float] | Losses) -> list[int]:
    """Return the steps, from 0, at which the guard finds a spike or a drop with its default settings."""
    guard = Guard(GuardConfig())
    return [step for step, loss in enumerate(losses) if guard.judge(step + 1, float(loss), 1.0).rule is not None]


def higher(losses: Losses, at: int) -> list[int]:
    losses[at] += 0.6
    return [at]


def tenfold(losses: Losses, at: int) -> list[int]:
    losses[at] *= 10
    return [at]


def climbing(losses: Losses, at: int) -> list[int]:
    losses[at:] += 0.007 * np.arange(len(losses) - at)
    return list(range(at, len(losses)))


def is_found(noise: str, seed: int, at: int, plant: Callable[[Losses, int], list[int]], steps_after: int = 1) -> bool:
    """Return whether the guard finds a fault that is planted at a step."""
    draw, sd = NOISES[noise]
    losses = LEVEL + sd * draw(np.random.default_rng(seed), at + steps_after)
    planted = plant(losses, at)
    return any(step in planted for step in alarms(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    print(
        "| noise | false alarms in 20,000 steps | +0.6 nats, step 150 | +0.6 nats, step 1,000 | x 10 | +0.007 a step, within 100 |"
    )
    print("|---|---|---|---|---|---|")
    for name, (draw, sd) in NOISES.items():
        false = [len(alarms(LEVEL + sd * draw(np.random.default_rng(seed), STEPS))) for seed in range(runs)]
        shares = [
            sum(is_found(name, seed, *fault) for seed in range(FAULT_RUNS)) / FAULT_RUNS
            for fault in ((150, higher), (1000, higher), (300, tenfold), (300, climbing, 100))
        ]
        print(f"| {name} | {', '.join(map(str, false))} | {' | '.join(f'{share:.0%}' for share in shares)} |", flush=True)


if __name__ == "__main__":
    main()
