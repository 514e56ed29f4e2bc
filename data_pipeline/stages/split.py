from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data_pipeline.config import SplitConfig
from data_pipeline.dataset.splits import SPLITS, Split, fewest_held_out, fractions_of_keys, is_held_out
from data_pipeline.dataset.tables import TableWriter, read_side_by_side, read_table
from data_pipeline.dedup.duplicates import Duplicates, Fate
from data_pipeline.documents import cut_text
from data_pipeline.execution.tasks import Counts, commit_result
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.read import ReadResult


def split_all(job: Job, read: Sequence[ReadResult], duplicates: Duplicates) -> list[SplitResult]:
    places = [task.place("duplicates") for task in job.tasks(PartitionTask)]
    # A data set that names a validation split has no other one.
    named = {part.file.source for partition in job.partitions for part in partition.parts if part.file.split == "validation"}
    settings = with_enough_held_out(job.config.split, duplicates.num_kept, [] if named else places)
    tasks = [
        job.task(SplitTask, number, settings=settings, is_named=partition.source in named)
        for number, partition in enumerate(job.partitions)
    ]
    return job.run("split", split_partition, tasks, [result.bytes for result in read], SplitResult)


_DROPPED = 255  # instead of the index of a split
_PLENTY = 100  # if more documents than this are held out on average, chance cannot hold out too few
_SPLIT_SCHEMA = pa.schema([("split", pa.uint8())])


@dataclass(frozen=True)
class SplitTask(PartitionTask):
    folder = "split"
    settings: SplitConfig
    is_named: bool = False
    """Whether the source names its validation split."""


@dataclass
class SplitResult:
    kept: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    benchmark_bytes: int = 0  # size of the documents that are dropped because they share text with a benchmark


def with_enough_held_out(settings: SplitConfig, num_kept: int, duplicates: Sequence[Path]) -> SplitConfig:
    """Return a larger `val_fraction` if chance would hold out too few. The tables are read only if there are few documents."""
    fewest = min(fewest_held_out(settings.min_val_documents, num_kept), num_kept - 1)
    if settings.by == "tail" or not duplicates or fewest < 1 or num_kept * settings.val_fraction > max(_PLENTY, 4 * fewest):
        return settings
    smallest = np.empty(0)
    for path in duplicates:
        table = read_table(path)
        kept_D = _keys(table)[table.column("fate").to_numpy() == 0]
        smallest = np.sort(np.concatenate([smallest, fractions_of_keys(kept_D, settings.seed)]))[:fewest]
    wanted = float(np.nextafter(smallest[-1], 1))
    return settings if wanted <= settings.val_fraction else settings.model_copy(update={"val_fraction": wanted})


def split_partition(task: SplitTask) -> SplitResult:
    """Write one row for each row of the text table."""
    result, settings = SplitResult(), task.settings
    group = _SameRecord()
    with TableWriter(task.output, _SPLIT_SCHEMA) as table:
        for text, duplicates in read_side_by_side(task.place("text"), task.place("duplicates")):
            fates_D = duplicates.column("fate").to_numpy()
            if settings.by == "tail" or task.is_named:
                held_out_D = text.column("tail").to_numpy(zero_copy_only=False)
            else:
                held_out_D = is_held_out(_keys(duplicates), settings.val_fraction, settings.seed)
            held_out_D = group.as_first(text, held_out_D)
            split_D = np.where(held_out_D, SPLITS.index("val"), SPLITS.index("train")).astype(np.uint8)
            split_D[fates_D != Fate.KEEP] = _DROPPED
            num_bytes_D = pc.binary_length(text.column("text")).to_numpy()
            for number, split in enumerate(SPLITS):
                result.kept[split] += int((split_D == number).sum())
                result.bytes[split] += int(num_bytes_D[split_D == number].sum())
            result.benchmark_bytes += int(num_bytes_D[fates_D == Fate.BENCHMARK].sum())
            table.write(pa.RecordBatch.from_arrays([pa.array(split_D)], schema=_SPLIT_SCHEMA))
    return commit_result(task, result, table.written)


class _SameRecord:
    """Keeps the examples of one conversation in one split: that of the first."""

    def __init__(self) -> None:
        self._last: tuple[str, int, bool] | None = None

    def as_first(self, text: pa.Table, held_out_D: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if "special" not in text.schema.names:
            return held_out_D
        decided = []
        columns = (text.column(name).to_pylist() for name in ("path", "line", "special"))
        for path, line, special, own in zip(*columns, held_out_D.tolist(), strict=True):
            is_same = special and self._last is not None and self._last[:2] == (path, line)
            self._last = (path, line, self._last[2] if is_same and self._last is not None else own)
            decided.append(self._last[2])
        return np.array(decided, np.bool_)


def share_lost_to_benchmarks(read: Sequence[ReadResult], split: Sequence[SplitResult]) -> dict[str, float]:
    lost: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for before, after in zip(read, split, strict=True):
        lost[before.source] += after.benchmark_bytes
        total[before.source] += before.bytes
    return {source: lost[source] / max(total[source], 1) for source in total}


def _keys(duplicates: pa.Table) -> NDArray[np.uint64]:
    keys_D = np.array(duplicates.column("split_key").to_pylist(), "S16")
    return np.frombuffer(keys_D, np.uint64)[::2]


def read_kept(text: Path, split: Path) -> Iterator[pa.RecordBatch]:
    """Yield the kept documents of a partition in batches, with the columns of the text table and `split`."""
    for documents, sides in read_side_by_side(text, split):
        split_D = sides.column("split").combine_chunks()
        yield documents.append_column("split", split_D).filter(pa.array(split_D.to_numpy() != _DROPPED))


def texts_of(batch: pa.RecordBatch, split: Split) -> list[str]:
    chosen = batch.filter(pa.array(batch.column("split").to_numpy() == SPLITS.index(split)))
    texts: list[str] = chosen.column("text").to_pylist()
    if "special" not in chosen.schema.names:
        return texts
    # The names of special tokens in conversations are no text that a tokenizer should learn.
    return ["".join(cut_text(*one)[::2]) for one in zip(texts, chosen.column("special").to_pylist(), strict=True)]
