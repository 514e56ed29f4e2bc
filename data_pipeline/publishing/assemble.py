"""Assembles prepared data from the results of the stages: names the shards, renders the reports, and publishes everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import canonical_json, digest_bytes, digest_file
from data_pipeline.dataset.layout import CARD, CHOSEN, DOCUMENTS, LABELS, REFERENCE, REPORT, REPORT_PAGE, TIMINGS, TOKENIZER, TOKENS
from data_pipeline.dataset.manifest import FORMAT, MASKED_FORMAT, Manifest, ShardEntry
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.splits import Split
from data_pipeline.dataset.tables import data_path
from data_pipeline.publishing.fingerprint import fingerprint_of
from data_pipeline.publishing.publish import publish
from data_pipeline.reports.data_card import render_card
from data_pipeline.reports.html_page import render_report
from data_pipeline.stages.pack import DocumentsOf, PackResult, PackTask
from data_pipeline.stages.train_tokenizer import TrainedTokenizer

__all__ = ["Prepared", "assemble"]


@dataclass(frozen=True)
class Prepared:
    """Everything that prepared data consists of, before it is published."""

    settings: Mapping[str, Any]  # the result of `settings_of`
    inputs: Sequence[Mapping[str, Any]]
    partitions: Sequence[Mapping[str, Any]]
    tokenizer: TrainedTokenizer
    tokenizer_folder: Path  # folder of the tokenizer's files. Only the files of `tokenizer.files` are published.
    documents: Sequence[DocumentsOf]
    packed: Sequence[tuple[PackTask, PackResult]]
    report: dict[str, Any]
    timings: dict[str, Any]
    has_mask: bool  # whether tables or shards have a loss mask
    reference: Path | None = None  # the reference model, if one was trained

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.settings, self.inputs)


def assemble(prepared: Prepared, output: Path, work: Path, more: Mapping[str, Path | bytes]) -> Manifest:
    report = canonical_json(prepared.report)
    shards = dict(_name_shards(prepared.packed))
    tokenizer = prepared.tokenizer
    documents = dict(_documents(prepared.documents)) if prepared.settings["packing"]["keep_tokens"] else {}
    facts = dict(_facts(prepared.packed)) | dict(_labels(prepared.packed))
    digests = {f"{TOKENIZER}/{name}": digest for name, digest in tokenizer.files.items()} | {REPORT: digest_bytes(report)}
    models = {} if prepared.reference is None else {REFERENCE: prepared.reference}
    digests |= {name: digest_file(path) for name, path in models.items()}
    manifest, _ = Manifest(
        fingerprint=prepared.fingerprint,
        row_length=prepared.settings["row_length"],
        vocab_size=tokenizer.vocab_size,
        token_type=token_type(tokenizer.vocab_size).name,
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=tuple(dict.fromkeys(partition["source"] for partition in prepared.partitions)),
        shards=tuple(shards),
        files=digests | {name: digest for name, (_, digest) in {**documents, **facts}.items()},
        inputs=tuple(dict(identity) for identity in prepared.inputs),
        partitions=tuple(dict(identity) for identity in prepared.partitions),
        config=dict(prepared.settings),
        totals=prepared.report,
        format=MASKED_FORMAT if prepared.has_mask else FORMAT,
    ).sealed()
    files: dict[str, Path | bytes] = {
        **{f"{TOKENIZER}/{name}": prepared.tokenizer_folder / name for name in tokenizer.files},
        REPORT: report,
        REPORT_PAGE: render_report(manifest, prepared.timings).encode(),
        CARD: render_card(manifest).encode(),
        TIMINGS: canonical_json(prepared.timings),
        **{name: path for name, (path, _) in {**documents, **facts}.items()},
        **models,
        **more,
    }
    return publish(output, work, manifest, {entry.path: path for entry, path in shards.items()}, files)


def _documents(documents: Sequence[DocumentsOf]) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield name, current path and digest of each table of documents."""
    for partition in documents:
        for folder in (TOKENS, CHOSEN):
            path = data_path(partition.place(folder))
            yield f"{folder}/{path.name}", (path, partition.digests[folder])


def _facts(packed: Sequence[tuple[PackTask, PackResult]]) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield name, current path and digest of each table of facts about validation documents, numbered within its source."""
    numbers: Counter[str] = Counter()
    for task, result in packed:
        if result.facts_sha256:
            path = data_path(task.output / DOCUMENTS)
            yield f"{DOCUMENTS}/{task.source}-{numbers[task.source]:05d}.arrow", (path, result.facts_sha256)
            numbers[task.source] += 1


def _labels(packed: Sequence[tuple[PackTask, PackResult]]) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield name, current path and digest of each table of labels, numbered within its split and source."""
    numbers: Counter[tuple[str, Split]] = Counter()
    for task, result in packed:
        if result.labels_sha256:
            number = numbers[task.source, task.split]
            numbers[task.source, task.split] += 1
            path = data_path(task.output / LABELS)
            yield f"{LABELS}/{task.split}-{task.source}-{number:05d}.arrow", (path, result.labels_sha256)


def _name_shards(packed: Sequence[tuple[PackTask, PackResult]]) -> Iterator[tuple[ShardEntry, Path]]:
    """Yield the manifest's entry for each shard, numbered within its source and split, and the shard's current path."""
    numbers: Counter[tuple[str, Split]] = Counter()
    for task, result in packed:
        for shard in result.shards:
            number = numbers[task.source, task.split]
            numbers[task.source, task.split] += 1
            counts = {name: value for name, value in shard.items() if name != "name"}
            path = f"{task.split}/{task.source}-{number:05d}.arrow"
            yield ShardEntry(path=path, split=task.split, source=task.source, **counts), task.output / shard["name"]
