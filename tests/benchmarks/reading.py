"""Reading batches of training rows, in one process without training.

    python -m tests.benchmarks.reading rows|memmap|late-READERS DATA [STREAM]

prints the sample of a contestant. `rows` and `memmap` read 12 random rows of 64 tokens and make tensors of them. `late-N` reads
rows of 1,024 tokens from storage that answers 5 ms late, with N readers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from tests.benchmarks.bench import Bench, write_stream
from tests.benchmarks.harness import OWN, Comparison, Contestant, Sample, run_program
from tests.support.prepared import write_prepared
from trainer.config import BatchConfig, LoaderConfig
from trainer.data.loader import prefetched_batches
from trainer.data.order import UniformOrder
from trainer.distributed.group import Group

BATCH, LENGTH, NUM_BATCHES = 12, 64, 4000
LATE_LENGTH, LATE_BATCH, LATE_S, NUM_LATE = 1024, 64, 0.005, 60


def comparisons(bench: Bench) -> Iterator[Comparison]:
    data, stream = bench.folder / "rows", bench.folder / "rows.bin"
    if not data.exists():
        write_stream(write_prepared(data, train_rows=20_000, row_length=LENGTH + 1), stream)
    contestants: dict[str, Contestant] = {
        OWN: partial(measured, "rows", data),
        "memmap": partial(measured, "memmap", data, stream),
    }
    rounds = 1 if bench.quick else 5
    unit, title = "batches/s", f"Random rows, {BATCH} of {LENGTH} tokens, as tensors"
    yield Comparison(
        "rows", title, unit, contestants, "memmap", goal="0.7 times as fast as a memmap", rounds=rounds, higher_is_better=True
    )
    if not bench.quick:
        late = bench.folder / "late"
        if not late.exists():
            write_prepared(late, train_rows=4096, row_length=LATE_LENGTH)
        readers: dict[str, Contestant] = {
            f"{OWN}, {number} readers": partial(measured, f"late-{number}", late) for number in (1, 2, 4, 8)
        }
        title = f"Storage that answers {1000 * LATE_S:.0f} ms late, {LATE_BATCH} rows of {LATE_LENGTH} tokens"
        yield Comparison("late-storage", title, unit, readers, f"{OWN}, 1 readers", rounds=3, higher_is_better=True)


def measured(way: str, data: Path, *rest: object) -> Sample:
    """The last of `rest` is the folder of the round, which is not needed."""
    return run_program("tests.benchmarks.reading", way, data, *rest[:-1]).reported()


class LateRows(Rows):
    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        time.sleep(LATE_S)
        return super().read(indices)


@contextmanager
def loader(rows: Rows, batch: int, micro: int, readers: int) -> Iterator[Callable[[], object]]:
    """Yield a function that waits for the next global batch."""
    config = BatchConfig(global_batch_size=batch, micro_batch_size=micro)
    order, group = UniformOrder(0, len(rows)), Group(0, 1, 0, torch.device("cpu"))
    with prefetched_batches(rows, config, group, order, 0, 8, loader=LoaderConfig(readers=readers)) as batches:
        yield lambda: next(batches)


def crops(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read inputs and targets as nanoGPT's get_batch does."""
    tokens = np.memmap(path, dtype=np.uint16, mode="r")
    starts = torch.randint(len(tokens) - LENGTH, (BATCH,))
    x, y = (torch.stack([torch.from_numpy(tokens[i + d : i + d + LENGTH].astype(np.int64)) for i in starts]) for d in (0, 1))
    return x, y


def rate(read: Callable[[], object], number: int) -> dict[str, object]:
    for _ in range(10):
        read()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(number):
        read()
    taken = time.perf_counter() - begun
    return {"value": number / taken, "cpu": time.process_time() - cpu, "facts": {"batches": number}}


def main(way: str, data: Path, stream: Path) -> None:
    torch.set_num_threads(1)
    if way == "memmap":
        sample = rate(partial(crops, stream), NUM_BATCHES)
    elif way == "rows":
        with loader(Rows(data, read_manifest(data), "train"), BATCH, BATCH, LoaderConfig().readers) as read:
            sample = rate(read, NUM_BATCHES)
    else:
        with loader(LateRows(data, read_manifest(data), "train"), LATE_BATCH, 8, int(way.removeprefix("late-"))) as read:
            sample = rate(read, NUM_LATE)
    print(json.dumps(sample))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[-1]))
