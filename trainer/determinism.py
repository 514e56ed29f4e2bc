"""Settings of the process on which the bits of a run depend."""

from __future__ import annotations

import os

import torch

from trainer.config import TrainConfig

__all__ = ["configure_determinism", "seed_step", "threads_per_rank"]


def configure_determinism(config: TrainConfig) -> None:
    """Fixes thread count and, for `reproducibility = run`, deterministic kernels. Call it before anything runs on a GPU."""
    torch.set_num_threads(threads_per_rank(config))
    deterministic = config.reproducibility != "off"
    if deterministic:  # cuBLAS reads this once, when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic


def threads_per_rank(config: TrainConfig) -> int:
    """CPU threads of one rank: the setting, else OMP_NUM_THREADS, else an equal share of the cores this process may use."""
    if config.threads is not None:
        return config.threads
    if from_environment := os.environ.get("OMP_NUM_THREADS"):
        return int(from_environment)
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch's generators for one step of one rank.

    The generators' state is then a function of the counters and never has to be saved.
    """
    mixed = (seed * 1_000_003 + step) * 65_537 + rank & (1 << 63) - 1
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed also visits devices that are not there: 1.2 ms each time
    if torch.cuda.is_available():
        torch.cuda.manual_seed(mixed)
