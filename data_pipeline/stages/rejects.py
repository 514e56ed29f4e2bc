from __future__ import annotations

import base64
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson
import zstandard

from common.files import digest_file, unfinished_path
from data_pipeline.dataset.layout import REJECTED, REJECTS, rejected_name
from data_pipeline.dataset.tables import read_batches
from data_pipeline.documents import Reason, partition_of
from data_pipeline.execution.tasks import commit_result
from data_pipeline.quality.perplexity import Bounds
from data_pipeline.sources.inputs import Partition
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.read import ReadResult
from data_pipeline.stages.reject_samples import REJECTED_TABLES, find_rows
from data_pipeline.stages.select import SelectResult, duplicates_of, not_selected


def collect_rejects(
    partitions: Sequence[Partition], read: Sequence[ReadResult], selected: Sequence[SelectResult] = (), most: int = 1000
) -> Iterator[dict[str, Any]]:
    """Yield at most `most` rejected documents for each reason, by partition. Line numbers count from the start of the file."""
    shown: Counter[str] = Counter()
    lines = lines_before(partitions, read)
    later = [result.first_rejects for result in selected] or [[]] * len(read)
    for result, before, after in zip(read, lines, later, strict=True):
        for sample in chain(result.samples, after):
            shown[sample["reason"]] += 1
            if shown[sample["reason"]] <= most:
                line = sample["line"] and sample["line"] + before
                kept = ""
                if "kept" in sample:  # a duplicate: the place of the document that is kept instead
                    identity, path, kept_line = sample["kept"]
                    number = partition_of(identity)
                    kept = f" ({partitions[number].source}: {path}, line {kept_line + lines[number]:,})"
                yield {
                    **{name: value for name, value in sample.items() if name != "kept"},
                    "detail": sample["detail"] + kept,
                    "stage": Reason(sample["reason"]).stage,
                    "source": result.source,
                    "line": line,
                }


def lines_before(partitions: Sequence[Partition], read: Sequence[ReadResult]) -> list[int]:
    """Return for each partition the number of lines of its first file that are in earlier partitions."""
    lines: list[int] = []
    before = 0
    for partition, result in zip(partitions, read, strict=True):
        before = before if partition.parts[0].start else 0
        lines.append(before)
        before += result.documents
    return lines


def write_rejects(
    job: Job, read: Sequence[ReadResult], selected: Sequence[SelectResult], bounds: Mapping[str, Bounds]
) -> dict[str, Path | bytes]:
    if job.config.keep_rejects == "none":
        return {}
    samples = collect_rejects(job.partitions, read, selected)
    shown = (json.dumps(sample, sort_keys=True, ensure_ascii=False).encode() + b"\n" for sample in samples)
    files: dict[str, Path | bytes] = {REJECTS: b"".join(shown)}
    if job.config.keep_rejects == "all":
        before = enumerate(lines_before(job.partitions, read))
        tasks = [job.task(RejectedTask, number, lines_before=lines, bounds=bounds) for number, lines in before]
        job.run("rejects", write_rejected_partition, tasks, [result.input_bytes for result in read], dict)
        files |= {rejected_name(task.number): _file_of(task) for task in tasks}
    return files


@dataclass(frozen=True)
class RejectedTask(PartitionTask):
    folder = REJECTED
    lines_before: int  # number of lines before the partition in its first file
    bounds: Mapping[str, Bounds]


def write_rejected_partition(task: RejectedTask) -> dict[str, int]:
    """Write them in the order of their ids, one JSON object on each line, compressed by zstd."""
    path = _file_of(task)
    temporary = unfinished_path(path)
    documents = 0
    paths = [task.output.with_name(f"{task.output.name}-{end}") for end in REJECTED_TABLES]
    while_reading = [chain.from_iterable(batch.to_pylist() for batch in read_batches(path)) for path in paths]
    try:
        with temporary.open("xb") as file, zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(file) as stream:
            for row in heapq.merge(*while_reading, _rejected_later(task), key=itemgetter("id")):
                stream.write(_line(row, task))
                documents += 1
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return commit_result(task, {"documents": documents}, {path: digest_file(path)})


def _file_of(task: RejectedTask) -> Path:
    return task.output.with_name(f"{task.output.name}.jsonl.zst")


def _line(row: Mapping[str, Any], task: RejectedTask) -> bytes:
    """Bytes that are not UTF-8 are written as base64."""
    shown = {name: row[name] for name in ("id", "reason", "detail", "path")}
    shown |= {"source": task.source, "stage": Reason(row["reason"]).stage.value}
    shown["line"] = row["line"] and row["line"] + task.lines_before
    if row["metadata"]:
        shown["metadata"] = orjson.Fragment(row["metadata"])
    try:
        shown["text"] = row["text"].decode() if isinstance(row["text"], bytes) else row["text"]
    except UnicodeDecodeError:
        shown["base64"] = base64.b64encode(row["text"]).decode()
    return orjson.dumps(shown, option=orjson.OPT_APPEND_NEWLINE)


def _rejected_later(task: RejectedTask) -> Iterator[dict[str, Any]]:
    rejected = heapq.merge(duplicates_of(task), not_selected(task, task.bounds[task.source]))
    for batch, row, one in find_rows(task.place("text"), rejected):
        found = {name: batch.column(name)[row].as_py() for name in ("path", "line", "metadata", "text")}
        yield {"id": one.id, "reason": one.reason.value, "detail": one.detail, **found}
