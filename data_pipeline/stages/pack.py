from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from common.files import digest_file, unfinished_path
from data_pipeline.config import PackingConfig
from data_pipeline.dataset.layout import CHOSEN, DOCUMENTS, LABELS, LOSS_RUNS, TOKENS
from data_pipeline.dataset.shards import ShardContent, token_type, write_shard
from data_pipeline.dataset.splits import SPLITS, Split
from data_pipeline.dataset.tables import DOCUMENTS_SCHEMA, LABELS_SCHEMA, TableWriter, data_path, read_side_by_side
from data_pipeline.execution.tasks import Counts, Runner, add_counts, commit_result
from data_pipeline.filters.judge import label_of
from data_pipeline.packing.placement import METHODS, count_packing, pack
from data_pipeline.packing.rows import Window, fill_rows, num_tokens_of, regroup
from data_pipeline.stages.train_tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class DocumentsOf:
    """The documents of a partition, in a work folder or in prepared data."""

    source: str
    number: int
    root: Path
    tokens: Mapping[str, int]  # number of tokens that go into rows, by split
    digests: Mapping[str, str]  # digest of each of the two tables, by folder
    label_field: str | None = None  # the field of the metadata that holds the label; None if the source has no labels

    def place(self, folder: str) -> Path:
        return self.root / folder / f"{self.number:06d}"


def pack_all(
    run: Runner,
    row_length: int,
    packing: PackingConfig,
    tokenizer: TrainedTokenizer,
    documents: Sequence[DocumentsOf],
    work: Path,
    labels: Sequence[str] = (),
    *,
    has_pairs: bool = False,
) -> list[tuple[PackTask, PackResult]]:
    """Pack in groups of consecutive partitions that fill about one shard. `labels` is sorted, or empty if there are none."""
    token_bytes = token_type(tokenizer.vocab_size).itemsize
    tasks, sizes = [], []
    for source, of_source in groupby(documents, key=lambda partition: partition.source):
        members = list(of_source)
        for split in SPLITS:
            for group in group_by_tokens(members, split, packing.shard_bytes // token_bytes):
                place = work / "shards" / f"{source}-{split}-{group[0].number:06d}"
                more = (row_length, token_bytes, tokenizer.pad_id, packing, place, tuple(labels), has_pairs)
                tasks.append(PackTask(source, tuple(group), split, *more))
                sizes.append(token_bytes * sum(partition.tokens[split] for partition in group))
    return list(zip(tasks, run("pack", pack_group, tasks, sizes, PackResult), strict=True))


def group_by_tokens(partitions: Sequence[DocumentsOf], split: Split, group_tokens: int) -> Iterator[list[DocumentsOf]]:
    """Yield groups of consecutive partitions that reach `group_tokens` tokens of a split; the last group may be smaller."""
    group: list[DocumentsOf] = []
    in_group = 0
    for partition in partitions:
        group.append(partition)
        in_group += partition.tokens[split]
        if in_group >= group_tokens:
            yield group
            group, in_group = [], 0
    if in_group:
        yield group


@dataclass(frozen=True)
class PackTask:
    source: str
    documents: tuple[DocumentsOf, ...]
    split: Split
    row_length: int
    token_bytes: int
    pad_id: int
    settings: PackingConfig
    output: Path  # folder of the shards
    labels: tuple[str, ...] = ()  # names of all labels, sorted
    has_pairs: bool = False  # whether each document is a preference pair


@dataclass
class PackResult:
    documents: int = 0
    cut_documents: int = 0
    document_tokens: int = 0  # Tokens of the documents, without those that are repeated where a document is cut
    methods: dict[str, Counts] = field(
        default_factory=lambda: {method: {"rows": 0, "cut_documents": 0, "tokens": 0} for method in METHODS}
    )
    shards: list[dict[str, Any]] = field(default_factory=list)  # name, rows, tokens, targets, bytes and digest of each shard
    targets_without_loss: int | None = None  # None if no document of the source has a loss mask
    tables: dict[str, str] = field(default_factory=dict)  # digest of the table of facts (of validation) or labels, by folder


def pack_group(task: PackTask) -> PackResult:
    result = PackResult()
    temporary = unfinished_path(task.output)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    rows_per_shard = max(1, task.settings.shard_bytes // (task.row_length * task.token_bytes))
    for batch in regroup(_packed_windows(task, result), rows_per_shard, lambda rows: np.ones(rows.num_rows, np.int64)):
        content = ShardContent.of(batch)
        path = temporary / f"{len(result.shards):05d}.arrow"
        write_shard(path, content)
        if content.mask is not None:
            hidden = replace(content, mask=None).num_targets - content.num_targets
            result.targets_without_loss = (result.targets_without_loss or 0) + hidden
        result.shards.append(
            {
                "name": path.name,
                "rows": len(content.tokens_RL),
                "tokens": content.num_tokens,
                "targets": content.num_targets,
                "bytes": path.stat().st_size,
                "sha256": digest_file(path),
            }
        )
        del batch, content  # frees the shard before the next one fills
    files = {shard["name"]: shard["sha256"] for shard in result.shards}
    tables = {DOCUMENTS: (DOCUMENTS_SCHEMA, _facts(task))} if task.split == "val" else {}
    if (label_field := task.documents[0].label_field) is not None:
        tables[LABELS] = (LABELS_SCHEMA, _labels(task, label_field))
    for name, (schema, batches) in tables.items():
        with TableWriter(temporary / name, schema) as table:
            for batch in batches:
                table.write(batch)
        result.tables[name] = files[data_path(Path(name)).name] = table.digest
    shutil.rmtree(task.output, ignore_errors=True)  # renamed by a run that was killed before it wrote the result
    temporary.rename(task.output)
    return commit_result(task, result, {task.output / name: digest for name, digest in files.items()})


def _packed_windows(task: PackTask, result: PackResult) -> Iterator[pa.RecordBatch]:
    has_labels = task.documents[0].label_field is not None

    def num_packed(documents: pa.RecordBatch) -> NDArray[np.int64]:
        return np.minimum(num_tokens_of(documents), task.row_length) if has_labels else num_tokens_of(documents)

    for documents in regroup(_tokenized(task), task.settings.window_tokens, num_packed):
        window = _cut_to_rows(Window.of(documents), task.row_length, result) if has_labels else Window.of(documents)
        packings = {method: pack(window.lengths_D, task.row_length, method) for method in METHODS}
        result.documents += len(window.ids_D)
        result.document_tokens += len(window.tokens_T)
        counts = {method: count_packing(packing) for method, packing in packings.items()}
        result.cut_documents += counts[task.settings.method]["cut_documents"]
        result.methods = {method: add_counts([result.methods[method], counts[method]]) for method in METHODS}
        yield from fill_rows(window, packings[task.settings.method], task.row_length, task.pad_id, has_pairs=task.has_pairs)
        del documents, window  # frees them before the next one is gathered


def _with_copies(task: PackTask) -> Iterator[tuple[pa.RecordBatch, NDArray[np.uint8]]]:
    """Yield all documents, and how often each one is in the rows of the task's split."""
    for one in task.documents:
        for batch, row in read_side_by_side(one.place(TOKENS), one.place(CHOSEN)):
            is_in_D = batch.column("split").to_numpy() == SPLITS.index(task.split)
            yield batch, row.column("copies").to_numpy() * is_in_D


def _tokenized(task: PackTask) -> Iterator[pa.RecordBatch]:
    """Yield each document once in order, then those with a second copy again, and so on, so that copies are far apart."""
    copy, most = 0, 1
    while copy < most:
        for batch, copies_D in _with_copies(task):
            most = max(most, int(copies_D.max(initial=0)))
            taken = batch.select([name for name in ("id", "tokens", LOSS_RUNS) if name in batch.schema.names])
            yield taken.filter(pa.array(copies_D > copy))
        copy += 1


def _cut_to_rows(window: Window, row_length: int, result: PackResult) -> Window:
    """Cut each document to the length of a row. Its last token, which may be eos, stays the last one."""
    ends_D = np.cumsum(window.lengths_D)
    places_T = np.arange(len(window.tokens_T)) - np.repeat(ends_D - window.lengths_D, window.lengths_D)
    left_T = np.repeat(window.lengths_D, window.lengths_D) - places_T
    is_kept_T = (places_T < row_length - 1) | (left_T == 1)
    result.cut_documents += int((window.lengths_D > row_length).sum())
    has_loss_T = None if window.has_loss_T is None else window.has_loss_T[is_kept_T]
    return Window(window.ids_D, np.minimum(window.lengths_D, row_length), window.tokens_T[is_kept_T], has_loss_T)


def _labels(task: PackTask, label_field: str) -> Iterator[pa.RecordBatch]:
    numbers = {name: number for number, name in enumerate(task.labels)}
    for batch, copies_D in _with_copies(task):
        taken = batch.select(["id", "metadata"]).filter(pa.array(copies_D > 0))
        labels = [numbers[label_of(metadata, label_field)] for metadata in taken.column("metadata").to_pylist()]
        yield pa.RecordBatch.from_arrays([taken.column("id"), pa.array(labels, pa.uint16())], schema=LABELS_SCHEMA)


def _facts(task: PackTask) -> Iterator[pa.RecordBatch]:
    for batch, copies_D in _with_copies(task):
        lengths = pa.array(np.diff(batch.column("tokens").offsets.to_numpy()).astype(np.uint32))
        facts = [batch.column("id"), batch.column("kind"), lengths]
        yield pa.RecordBatch.from_arrays(facts, schema=DOCUMENTS_SCHEMA).filter(pa.array(copies_D > 0))
