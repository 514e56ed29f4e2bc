from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.config import KINDS, PrepareConfig
from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.rendering import ChatRenderer
from data_pipeline.dataset.layout import REJECTED
from data_pipeline.dataset.splits import tail_offset
from data_pipeline.dataset.tables import TableWriter
from data_pipeline.dedup.benchmarks import load_benchmarks
from data_pipeline.dedup.duplicates import PartitionKeys
from data_pipeline.dedup.keys import KeyWriter, sign
from data_pipeline.documents import Document, Rejection, document_id
from data_pipeline.execution.tasks import Counts, add_counts, add_nested, commit_result
from data_pipeline.filters.html import PageReader
from data_pipeline.filters.judge import JudgedBatch, JudgedDocument, judge_batch, label_of
from data_pipeline.filters.language import kept_by_threshold
from data_pipeline.sources.formats import IgnoredFiles, count_extension, printable
from data_pipeline.sources.inputs import Part, Partition
from data_pipeline.sources.parsers.source_format import chat_fields
from data_pipeline.sources.readers import read_part
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.reject_samples import SAMPLES_PER_REASON, RejectedWriter


def read_all(job: Job, chat: ChatTemplate | None = None) -> list[ReadResult]:
    """The template turns conversations into text."""
    if chat is not None:
        with ChatRenderer(chat) as chats:
            chats.end_of_turn()
            if added := chats.added_to_prompts():
                logger.warning(
                    "the chat template ends a prompt with %r, which its text of an answer may lack; a model that has not seen it "
                    "before an answer may go on badly in a conversation",
                    added,
                )
    tasks = [job.task(ReadTask, number, partition=partition, chat=chat) for number, partition in enumerate(job.partitions)]
    return job.run("read", read_partition, tasks, [partition.bytes for partition in job.partitions], ReadResult)


def keys_of(read: Sequence[ReadResult]) -> list[PartitionKeys]:
    return [PartitionKeys(number, result.source, result.kept) for number, result in enumerate(read)]


def report_of_reading(read: Sequence[ReadResult], ignored: IgnoredFiles) -> dict[str, Any]:
    confidences = add_nested(result.confidences for result in read)
    return {
        "ignored": ignored.report(add_counts(result.ignored for result in read)),
        "malformed": add_nested(result.malformed for result in read),
        "cleaned": add_counts(result.changes for result in read),
        "unused_fields": add_counts(result.unused for result in read),
        "language_confidence": {
            language: {"all": sum(counts.values())} | kept_by_threshold(counts)
            for language, counts in sorted(confidences.items(), key=lambda item: (-sum(item[1].values()), item[0]))
        },
    }


logger = logging.getLogger(__name__)

_BATCH_CHARS = 1 << 20  # judged together: enough for vectorized rules, and little memory
_BATCH_METADATA_CHARS = 1 << 24  # limited separately from the text, because the table's batches hold the metadata, too
_BATCH_ITEMS = 1 << 14
_MAX_FIELDS, _MAX_FIELD_CHARS = 1000, 100  # counted separately, because each record of a stranger can have other fields
TEXT_SCHEMA = pa.schema(
    [
        ("id", pa.uint64()),
        ("kind", pa.uint8()),
        ("language", pa.string()),
        ("metadata", pa.string()),
        ("path", pa.string()),
        ("line", pa.uint32()),
        ("characters", pa.uint32()),
        ("tail", pa.bool_()),
        ("text", pa.large_string()),
        ("parts", pa.list_(pa.uint32())),
    ]
)
"""`tail`: it is in a validation split, or begins in the part of its file that a split by position holds out. `parts` are those of
`Document`."""
CHAT_SCHEMA = TEXT_SCHEMA.append(pa.field("special", pa.list_(pa.uint32())))  # with a chat template: also special tokens


@dataclass(frozen=True)
class ReadTask(PartitionTask):
    folder = "text"
    partition: Partition
    chat: ChatTemplate | None = None  # the template of conversations; None if there are none


@dataclass
class ReadResult:
    source: str
    input_bytes: int
    documents: int = 0  # everything that was read, including rejections. In JSON Lines this is the number of lines.
    kept: int = 0
    bytes: int = 0  # size of the kept documents as UTF-8
    rejected: Counts = field(default_factory=dict)
    changes: Counts = field(default_factory=dict)  # number of documents that each cleaning rule changed
    confidences: dict[str, Counts] = field(default_factory=dict)  # documents by identified language and confidence
    samples: list[dict[str, Any]] = field(default_factory=list)  # the first rejections of each reason
    unused: Counts = field(default_factory=dict)  # documents by the fields of records and messages that nothing uses
    ignored: Counts = field(default_factory=dict)  # number of files of an unknown format in archives, by extension
    malformed: dict[str, Counts] = field(default_factory=dict)  # items that are no document, by reason and extension


def read_partition(task: ReadTask) -> ReadResult:
    """Write the kept documents of a partition, the keys by which their duplicates are found, and the rejected documents."""
    config = task.config
    result = ReadResult(task.source, task.partition.bytes)
    rejected: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    with (
        TableWriter(task.output, CHAT_SCHEMA if task.chat else TEXT_SCHEMA) as table,
        KeyWriter(task.place("keys"), config.dedup) as keys,
        PageReader(config.limits) as pages,
        RejectedWriter(task.place(REJECTED) if config.keep_rejects == "all" else None) as rejects,
        nullcontext() if task.chat is None else ChatRenderer(task.chat, config.chat) as chats,
    ):
        for parts, items in _batches(task.partition, config, rejects, ignored, unread, chats):
            judged = judge_batch(items, config, pages)
            ids = [document_id(task.partition.number, result.documents + number) for number in range(len(items))]
            kept = [number for number, item in enumerate(judged.items) if isinstance(item, JudgedDocument)]
            if kept:
                rows = _rows(judged, kept, parts, ids, config)
                table.write(rows)
                result.bytes += pc.sum(pc.binary_length(rows.column("text"))).as_py()
                overlaps = None
                if config.dedup.benchmarks:
                    benchmarks = load_benchmarks(config.dedup.benchmarks, config.dedup.benchmark_words)
                    overlaps = benchmarks.count(judged.texts)[judged.kept]
                field = config.records.label_field
                labels = [] if field is None else [label_of(one, field) for one in rows.column("metadata").to_pylist()]
                masks = [repr(parts) if parts else "" for parts in rows.column("parts").to_pylist()]
                signed = sign(judged.texts, judged.kept, config.dedup, labels, masks)
                # Examples of one conversation resemble each other on purpose.
                is_first_D = np.array([number == 0 or not is_same_record(judged.items, number) for number in kept], np.bool_)
                signed = replace(signed, has_words_D=signed.has_words_D & is_first_D)
                keys.add([ids[number] for number in kept], signed, overlaps)
            _count(judged, rejected, result)
            for identity, item in zip(ids, judged.items, strict=True):
                if isinstance(item, Rejection) and item.document is not None:  # malformed items are written already
                    rejects.add(identity, item)
            result.documents += len(items)
            result.kept += len(kept)
    result.rejected, result.ignored = dict(rejected), dict(ignored)
    result.unused = dict(sorted((unread if chats is None else unread + chats.unused).items()))
    return commit_result(task, result, table.written, keys.written, rejects.written)


def is_same_record(items: Sequence[Rejection | JudgedDocument], number: int) -> bool:
    """Return whether a document is a further example of the conversation before it."""
    before, one = items[number - 1], items[number]
    if not (isinstance(before, JudgedDocument) and isinstance(one, JudgedDocument) and one.document.special):
        return False
    return (before.document.path, before.document.line) == (one.document.path, one.document.line)


def _batches(
    partition: Partition,
    config: PrepareConfig,
    rejects: RejectedWriter,
    ignored: Counter[str],
    unread: Counter[str],
    chats: ChatRenderer | None,
) -> Iterator[tuple[list[Part], list[Document | Rejection]]]:
    """Yield items, and for each the part of a file that it comes from. Malformed bytes go to `rejects` at once, to save memory."""
    ordinal = 0
    parts: list[Part] = []
    items: list[Document | Rejection] = []
    characters = metadata = 0
    names = chat_fields(config.records)
    for part in partition.parts:
        for read in read_part(part, config, ignored):
            found = [read]
            if isinstance(read, Document):
                unread.update(shown_field(name, unread) for name in read.unread)
            if chats and isinstance(read, Document) and read.markup == "chat":
                found = chats.documents(read, config.limits.max_json_depth, names)
            for item in found:
                parts.append(part)
                items.append(item if isinstance(item, Document) else replace(item, data=b""))
                if isinstance(item, Rejection):
                    rejects.add(document_id(partition.number, ordinal), item)
                ordinal += 1
                if isinstance(item, Document):
                    characters += len(item.text)
                    metadata += len(item.metadata)
            if characters >= _BATCH_CHARS or metadata >= _BATCH_METADATA_CHARS or len(items) >= _BATCH_ITEMS:
                yield parts, items
                parts, items, characters, metadata = [], [], 0, 0
    if items:
        yield parts, items


def shown_field(name: str, counts: Mapping[str, int]) -> str:
    shown = f"record.{printable(name[:_MAX_FIELD_CHARS])}"
    return shown if shown in counts or len(counts) < _MAX_FIELDS else "record.other"


def _rows(judged: JudgedBatch, kept: list[int], parts: list[Part], ids: list[int], config: PrepareConfig) -> pa.RecordBatch:
    documents: list[JudgedDocument] = [judged.items[number] for number in kept]  # type: ignore[misc]
    texts = judged.texts.bytes_N
    starts, ends = judged.texts.starts_D[judged.kept].tolist(), judged.texts.ends_D[judged.kept].tolist()
    is_tail = [
        parts[number].file.split == "validation"
        or (config.split.by == "tail" and one.document.offset >= tail_offset(parts[number].file.bytes, config.split.val_fraction))
        for number, one in zip(kept, documents, strict=True)
    ]
    columns = {
        "id": [ids[number] for number in kept],
        "kind": [KINDS.index(one.document.kind) for one in documents],
        "language": [one.language for one in documents],
        "characters": [len(one.document.text) for one in documents],
        "tail": is_tail,
        "text": [texts[start:end].tobytes() for start, end in zip(starts, ends, strict=True)],
        **{name: [getattr(one.document, name) for one in documents] for name in ("metadata", "path", "line", "parts", "special")},
    }
    schema = CHAT_SCHEMA if config.chat.is_on else TEXT_SCHEMA
    return pa.RecordBatch.from_pydict({name: columns[name] for name in schema.names}, schema)


def _count(judged: JudgedBatch, rejected: Counter[str], result: ReadResult) -> None:
    for item in judged.items:
        if isinstance(item, Rejection):
            rejected[item.reason] += 1
            if item.reason.malformed:
                count_extension(item.path, result.malformed.setdefault(item.reason.value, {}))
            if rejected[item.reason] <= SAMPLES_PER_REASON:
                result.samples.append(item.shown)
    result.changes = add_counts([result.changes, judged.changes])
    for language, bins in judged.confidences.items():
        result.confidences[language] = add_counts([result.confidences.get(language, {}), bins])
