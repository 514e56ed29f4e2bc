"""The stages that workers run, one task at a time; each leaves its result under its final name or not at all.

A task names its output. The data is written first and a small JSON file with the result last: where that file is, the task is done
and is not run again, however often the preparation was killed since.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from data_pipeline.clean import clean, judge_length
from data_pipeline.config import PackingSettings, PrepareConfig, TokenizerSettings
from data_pipeline.documents import Document, Rejection, document_id
from data_pipeline.engine import Engine
from data_pipeline.files import canonical_json, commit_directory, digest_file, sync_file, write_atomic
from data_pipeline.packing import pack
from data_pipeline.partitions import Partition
from data_pipeline.rows import Window, cut_into_shards, cut_into_windows, fill_rows
from data_pipeline.shards import token_type, write_shard
from data_pipeline.sources.readers import read_part
from data_pipeline.split import SPLITS, Split, choose_split
from data_pipeline.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Tokenizer, load_tokenizer
from data_pipeline.tokenizer_training import alphabet_of, sample_pieces, train_tokenizer

__all__ = [
    "PackResult",
    "PackTask",
    "ReadResult",
    "ReadTask",
    "SampleResult",
    "SampleTask",
    "Task",
    "TokenizeResult",
    "TokenizeTask",
    "TrainTask",
    "TrainedTokenizer",
    "pack_group",
    "read_partition",
    "run_stage",
    "sample_partition",
    "tokenize_partition",
    "train",
]

_BATCH_BYTES = 4 << 20  # text in one record batch of an intermediate file: bounds the memory of every stage
_SAMPLES_PER_REASON = 10

_TEXT_SCHEMA = pa.schema([("id", pa.uint64()), ("split", pa.uint8()), ("text", pa.large_string())])
_SAMPLE_SCHEMA = pa.schema([("text", pa.large_string())])

Counts = dict[str, int]


class Task(Protocol):
    """What a stage does once: a task names the place of its result."""

    @property
    def output(self) -> Path:
        """The path of its files, without their extensions."""


TaskT = TypeVar("TaskT", bound=Task)
ResultT = TypeVar("ResultT")


def run_stage(
    engine: Engine, function: Callable[[TaskT], ResultT], tasks: list[TaskT], result_type: Callable[..., ResultT]
) -> Iterator[ResultT]:
    """The results of a stage in the order of its tasks; what an earlier run has finished is read, not done again."""
    to_do = engine.map(function, [task for task in tasks if not _result_path(task).exists()])
    done = [_result_path(task).exists() for task in tasks]
    for task, is_done in zip(tasks, done, strict=True):
        yield result_type(**json.loads(_result_path(task).read_bytes())) if is_done else next(to_do)


# --- read: bytes to clean documents, each on its side of the split -------------------------------------------------------------


@dataclass(frozen=True)
class ReadTask:
    """Read, clean, judge and split one partition."""

    partition: Partition
    config: PrepareConfig
    output: Path


@dataclass
class ReadResult:
    """Counts of one partition."""

    source: str
    input_bytes: int
    documents: int = 0
    """Everything that was read, rejections included; in JSON Lines this is the number of lines."""
    kept: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    rejected: Counts = field(default_factory=dict)
    changes: Counts = field(default_factory=dict)
    """How many documents were changed by each cleaning rule."""
    characters: Counts = field(default_factory=dict)
    """Number of kept documents by their length."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """The first rejections of each reason."""


def read_partition(task: ReadTask) -> ReadResult:
    """Writes the kept documents of a partition to `output`.arrow."""
    result = ReadResult(task.partition.source, task.partition.bytes)
    rejected: Counter[str] = Counter()
    changes: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    with _TableWriter(task.output, _TEXT_SCHEMA) as table:
        for ordinal, (item, file_bytes) in enumerate(_read(task)):
            judged = _clean_and_judge(item, task.config, changes)
            if isinstance(judged, Rejection):
                rejected[judged.reason] += 1
                if rejected[judged.reason] <= _SAMPLES_PER_REASON:
                    result.samples.append(asdict(judged))
                continue
            text = judged.text.encode()
            split = choose_split(text, judged.offset, file_bytes, task.config.split)
            table.add((document_id(task.partition.number, ordinal), SPLITS.index(split), text), len(text))
            characters[str(len(judged.text))] += 1
            result.kept[split] += 1
            result.bytes[split] += len(text)
    result.documents = rejected.total() + sum(result.kept.values())
    result.rejected, result.changes, result.characters = dict(rejected), dict(changes), dict(characters)
    return _commit(task, result)


def _read(task: ReadTask) -> Iterator[tuple[Document | Rejection, int]]:
    for part in task.partition.parts:
        for item in read_part(part, task.config):
            yield item, part.file.bytes


def _clean_and_judge(item: Document | Rejection, config: PrepareConfig, changes: Counter[str]) -> Document | Rejection:
    if isinstance(item, Rejection):
        return item
    cleaned = clean(item.text, config.clean)
    changes.update(cleaned.changes)
    document = Document(cleaned.text, item.path, item.line, item.offset)
    return judge_length(document, config.clean) or document


# --- train: a sample of the training text to a tokenizer -----------------------------------------------------------------------


@dataclass(frozen=True)
class SampleTask:
    """Draw one partition's share of the tokenizer's training text."""

    text: Path
    fraction: float
    alphabet_only: bool
    output: Path


@dataclass(frozen=True)
class SampleResult:
    """Size of one partition's share."""

    bytes: int


def sample_partition(task: SampleTask) -> SampleResult:
    """Writes pieces of the training text, or only its alphabet, to `output`.arrow."""
    num_bytes = 0
    texts = (text for batch in _batches(task.text) for text in _train_texts(batch))
    with _TableWriter(task.output, _SAMPLE_SCHEMA) as table:
        for piece in [alphabet_of(texts)] if task.alphabet_only else sample_pieces(texts, task.fraction):
            data = piece.encode()
            table.add((data,), len(data))
            num_bytes += len(data)
    return _commit(task, SampleResult(num_bytes))


def _train_texts(batch: pa.RecordBatch) -> list[str]:
    texts: list[str] = _on_side(batch, "train").column("text").to_pylist()
    return texts


@dataclass(frozen=True)
class TrainTask:
    """Train the tokenizer on all shares, in the order of the partitions."""

    samples: tuple[Path, ...]
    settings: TokenizerSettings
    output: Path
    """The tokenizer's folder."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """What was trained."""

    kind: str
    vocab_size: int
    digest: str
    file_name: str


def train(task: TrainTask) -> TrainedTokenizer:
    """Writes the tokenizer's file into the folder `output`."""
    sample = [text for path in task.samples for batch in _batches(path) for text in batch.column("text").to_pylist()]
    tokenizer = train_tokenizer(sample, task.settings)
    task.output.mkdir(parents=True, exist_ok=True)
    write_atomic(task.output / tokenizer.file_name, tokenizer.to_bytes())
    return _commit(task, TrainedTokenizer(tokenizer.kind, tokenizer.vocab_size, tokenizer.digest, tokenizer.file_name))


# --- tokenize: documents to token ids ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizeTask:
    """Encode the documents of one partition."""

    text: Path
    tokenizer: Path
    settings: TokenizerSettings
    output: Path


@dataclass
class TokenizeResult:
    """Counts of one partition."""

    tokens: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    unknown: int = 0
    lengths: Counts = field(default_factory=dict)
    """Number of documents by their length in tokens, bos and eos included."""


def tokenize_partition(task: TokenizeTask) -> TokenizeResult:
    """Writes the token ids of a partition's documents to `output`.arrow."""
    tokenizer = load_tokenizer(task.tokenizer)
    ids_type = token_type(tokenizer.vocab_size)
    schema = pa.schema([("id", pa.uint64()), ("split", pa.uint8()), ("tokens", pa.large_list(pa.from_numpy_dtype(ids_type)))])
    result = TokenizeResult()
    lengths: Counter[str] = Counter()
    with _TableWriter(task.output, schema) as table:
        for batch in _batches(task.text):
            tokens, ends = _encode(tokenizer, batch.column("text").to_pylist(), task.settings)
            num_tokens = np.diff(ends, prepend=0)
            splits = batch.column("split").to_numpy()
            for number, split in enumerate(SPLITS):
                result.tokens[split] += int(num_tokens[splits == number].sum())
            result.unknown += int((tokens == UNK_ID).sum())
            lengths.update(map(str, num_tokens.tolist()))
            offsets = pa.array(np.concatenate([[0], ends]))
            values = pa.LargeListArray.from_arrays(offsets, pa.array(tokens.astype(ids_type)))
            table.write(pa.RecordBatch.from_arrays([batch.column("id"), batch.column("split"), values], schema=schema))
    result.lengths = dict(lengths)
    return _commit(task, result)


def _encode(
    tokenizer: Tokenizer, texts: list[str], settings: TokenizerSettings
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All ids one after the other, with bos and eos as the settings say, and where each document ends."""
    bos = [np.array([BOS_ID], np.int32)] if settings.add_bos else []
    eos = [np.array([EOS_ID], np.int32)] if settings.add_eos else []
    arrays = tokenizer.encode_arrays(texts)
    ends = np.cumsum([len(array) + len(bos) + len(eos) for array in arrays], dtype=np.int64)
    return np.concatenate([part for array in arrays for part in (*bos, array, *eos)]), ends


# --- pack: token ids to shards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackTask:
    """Pack one split of some consecutive partitions of one source."""

    source: str
    tokens: tuple[Path, ...]
    split: Split
    row_length: int
    token_bytes: int
    settings: PackingSettings
    output: Path
    """The folder that receives the shards."""


@dataclass
class PackResult:
    """Counts of one group of partitions, and its shards in order."""

    documents: int = 0
    cut_documents: int = 0
    pieces: int = 0
    document_tokens: int = 0
    """Tokens of the documents, before some are repeated where a document is cut."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """Name, rows, tokens, targets, bytes and digest of each."""


def pack_group(task: PackTask) -> PackResult:
    """Writes the shards of a group of partitions into the folder `output`."""
    result = PackResult()

    def packed_windows() -> Iterator[Any]:
        for window in cut_into_windows(_tokenized(task), task.settings.window_tokens):
            packing = pack(window.lengths_D, task.row_length, task.settings.method)
            result.documents += len(window.ids_D)
            result.document_tokens += len(window.tokens_T)
            result.pieces += len(packing.rows)
            result.cut_documents += int((np.bincount(packing.documents) > 1).sum())
            yield fill_rows(window, packing, task.row_length, PAD_ID)

    temporary = task.output.with_name(f".{task.output.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    rows_per_shard = max(1, task.settings.shard_bytes // (task.row_length * task.token_bytes))
    for number, content in enumerate(cut_into_shards(packed_windows(), rows_per_shard)):
        path = temporary / f"{number:05d}.arrow"
        write_shard(path, content)
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
    shutil.rmtree(task.output, ignore_errors=True)  # committed by a run that was killed before it could say so
    commit_directory(temporary, task.output)
    return _commit(task, result)


def _tokenized(task: PackTask) -> Iterator[Window]:
    for path in task.tokens:
        for batch in _batches(path):
            chosen = _on_side(batch, task.split)
            if chosen.num_rows:
                tokens = chosen.column("tokens")
                lengths = np.diff(tokens.offsets.to_numpy())
                yield Window(chosen.column("id").to_numpy(), lengths, tokens.flatten().to_numpy())


# --- what the stages share -----------------------------------------------------------------------------------------------------


class _TableWriter:
    """Writes an Arrow file in batches; it has its final name only when it is complete and on the device."""

    def __init__(self, output: Path, schema: pa.Schema) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._path = _data_path(output)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def __enter__(self) -> _TableWriter:
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        return self

    def add(self, row: tuple[Any, ...], num_bytes: int) -> None:
        self._rows.append(row)
        self._bytes += num_bytes
        if self._bytes >= _BATCH_BYTES:
            self._flush()

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def _flush(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, kind) for column, kind in zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
            ]
            self.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        self._file.close()
        if error is not None:
            self._temporary.unlink(missing_ok=True)
            return
        sync_file(self._temporary)
        self._temporary.rename(self._path)


def _batches(output: Path) -> Iterable[pa.RecordBatch]:
    """The record batches of an intermediate file, each mapped when it is its turn."""
    reader = pa.ipc.open_file(pa.memory_map(str(_data_path(output))))
    return (reader.get_batch(number) for number in range(reader.num_record_batches))


def _on_side(batch: pa.RecordBatch, split: Split) -> pa.RecordBatch:
    return batch.filter(pa.array(batch.column("split").to_numpy() == SPLITS.index(split)))


def _commit(task: Task, result: ResultT) -> ResultT:
    write_atomic(_result_path(task), canonical_json(asdict(result)))  # type: ignore[call-overload]
    return result


def _result_path(task: Task) -> Path:
    return task.output.with_name(f"{task.output.name}.json")


def _data_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.arrow")
