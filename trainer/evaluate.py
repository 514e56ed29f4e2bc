"""Validation loss over the whole validation set, the same number for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from data_pipeline.shards import Rows
from trainer.config import TrainConfig
from trainer.distributed import Group
from trainer.loader import micro_batch, share_of_rank
from trainer.loss import cross_entropy_rows
from trainer.model import Decoder
from trainer.step import autocast

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
    model: Decoder, rows: Rows, config: TrainConfig, group: Group, after_batch: Callable[[], None] = lambda: None
) -> Evaluation:
    """The mean loss over the validation rows, weighted by targets.

    Each rank computes a run of the batches and fills in the sums of its rows; every sum is then present on every rank and
    they are added in one order.
    """
    num_rows = min(len(rows), config.eval.max_rows or len(rows))
    chosen = np.arange(num_rows) * len(rows) // num_rows  # spread evenly: neighbours come from the same documents
    size = config.eval.micro or config.batch.micro
    sums = torch.zeros(num_rows, dtype=torch.float64, device=group.device)
    model.eval()
    for number in share_of_rank(-(-num_rows // size), group):
        here = chosen[number * size : (number + 1) * size]
        batch = micro_batch(rows.read(here)).to(group.device)
        with autocast(config, group.device):
            logits_BLV = model(batch.tokens, batch.segments, batch.positions)
        sums[number * size : number * size + len(here)] = cross_entropy_rows(logits_BLV, batch.targets)
        after_batch()
    model.train()
    num_targets = int(rows.num_targets(chosen).sum())
    total = math.fsum(group.sum(sums).tolist())
    return Evaluation(total / max(1, num_targets), num_rows, num_targets)
