"""How fast a rank reads batches, for different numbers of reader threads.

`python -m tests.benchmarks.loader` writes rows of random tokens to a temporary folder and reads them through the loader of the
trainer, from the page cache and with a pause before each read, as storage with that latency would cause.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from tests.support.prepared import write_prepared
from trainer.config import BatchConfig, LoaderConfig
from trainer.data.loader import prefetched_batches
from trainer.data.order import UniformOrder
from trainer.distributed.group import Group

ROW_LENGTH, NUM_ROWS = 1024, 4096
BATCH = BatchConfig(global_batch_size=64, micro_batch_size=8)
NUM_BATCHES = 60


class LateRows(Rows):
    """Rows from storage that answers late."""

    latency_s = 0.0

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        time.sleep(self.latency_s)
        return super().read(indices)


def tokens_per_s(rows: Rows, readers: int, depth: int) -> float:
    """Return the tokens per second that the loader delivers to a consumer that takes no time."""
    loader, order = LoaderConfig(readers=readers), UniformOrder(0, len(rows))
    group = Group(0, 1, 0, torch.device("cpu"))
    with prefetched_batches(rows, BATCH, group, order, 0, depth, loader=loader) as batches:
        for _ in range(depth + 2):
            next(batches)
        begun = time.perf_counter()
        for _ in range(NUM_BATCHES):
            next(batches)
        return NUM_BATCHES * BATCH.global_batch_size * ROW_LENGTH / (time.perf_counter() - begun)


def main() -> int:
    """Print one line for each latency and number of readers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_prepared(Path(folder), train_rows=NUM_ROWS, row_length=ROW_LENGTH)
        rows = LateRows(data, read_manifest(data), "train")
        for latency_s in (0.0, 0.005, 0.02):
            rows.latency_s = latency_s
            for readers in (1, 2, 4, 8):
                best = max(tokens_per_s(rows, readers, depth=8) for _ in range(3))
                print(f"{1000 * latency_s:4.0f} ms before each read, {readers} readers: {best / 1e6:6.1f} million tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
