"""Validation loss over the whole validation set, the same number for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data_pipeline.shards import Rows
from trainer.attention import Backend
from trainer.config import TrainConfig
from trainer.distributed import Group
from trainer.loader import micro_batch, share_of_rank
from trainer.step import LossModule, empty_micro_batch, forward_pass

__all__ = ["Evaluation", "evaluate"]


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts text that it was not trained on."""

    loss: float
    """Mean over all targets, in nats."""
    num_rows: int
    num_targets: int

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    loss: LossModule,
    backend: Backend,
    rows: Rows,
    config: TrainConfig,
    group: Group,
    after_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The mean loss over the validation rows, weighted by targets.

    Each rank computes a run of the batches and fills in the sums of its rows; every sum is then present on every rank and
    they are added in one order. Where ranks share the weights, all make the same number of passes, some over an empty batch.
    """
    num_rows = min(len(rows), config.eval.max_rows or len(rows))
    chosen = np.arange(num_rows) * len(rows) // num_rows  # spread evenly: neighbours come from the same documents
    size = config.eval.micro or config.batch.micro_rows
    sums = torch.zeros(num_rows, dtype=torch.float64, device=group.device)
    num_batches = -(-num_rows // size)
    own = share_of_rank(num_batches, group)
    loss.eval()
    for number in own:
        here = chosen[number * size : (number + 1) * size]
        batch = micro_batch(rows.read(here), with_bounds=backend == "varlen")
        sums[number * size : number * size + len(here)] = forward_pass(loss, batch, config, group.device, backend, by_row=True)
        after_batch()
    if config.parallel == "fsdp" and len(own) < -(-num_batches // group.world_size):
        forward_pass(loss, empty_micro_batch(size, rows.row_length, backend), config, group.device, backend, by_row=True)
    loss.train()
    num_targets = int(rows.num_targets(chosen).sum())
    total = math.fsum(group.sum(sums).tolist())
    return Evaluation(total / max(1, num_targets), num_rows, num_targets)
