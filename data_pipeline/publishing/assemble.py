from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.files import canonical_json, digest_bytes, digest_file
from data_pipeline.dataset.layout import CARD, CHOSEN, DOCUMENTS, LABELS, REFERENCE, REPORT, REPORT_PAGE, TIMINGS, TOKENIZER, TOKENS
from data_pipeline.dataset.manifest import FORMAT, MASKED_FORMAT, Manifest, ShardEntry
from data_pipeline.dataset.shards import token_type
from data_pipeline.dataset.tables import data_path
from data_pipeline.publishing.fingerprint import fingerprint_of
from data_pipeline.publishing.publish import publish
from data_pipeline.reports.pages import render_card, render_report
from data_pipeline.stages.pack import DocumentsOf, PackResult, PackTask
from data_pipeline.stages.train_tokenizer import TrainedTokenizer


@dataclass(frozen=True)
class Prepared:
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
    tokenizer = prepared.tokenizer
    shards, tables = _named(prepared.packed)
    for partition in prepared.documents if prepared.settings["packing"]["keep_tokens"] else ():
        for folder in (TOKENS, CHOSEN):
            path = data_path(partition.place(folder))
            tables[f"{folder}/{path.name}"] = (path, partition.digests[folder])
    digests = {f"{TOKENIZER}/{name}": digest for name, digest in tokenizer.files.items()} | {REPORT: digest_bytes(report)}
    models = {} if prepared.reference is None else {REFERENCE: prepared.reference}
    digests |= {name: digest_file(path) for name, path in models.items()}
    digests |= {name: digest for name, (_, digest) in tables.items()}
    manifest, _ = Manifest(
        fingerprint=prepared.fingerprint,
        row_length=prepared.settings["row_length"],
        vocab_size=tokenizer.vocab_size,
        token_type=token_type(tokenizer.vocab_size).name,
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=tuple(dict.fromkeys(partition["source"] for partition in prepared.partitions)),
        shards=tuple(shards),
        files=digests,
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
        **{name: path for name, (path, _) in tables.items()},
        **models,
        **more,
    }
    return publish(output, work, manifest, {entry.path: path for entry, path in shards.items()}, files)


def _named(packed: Sequence[tuple[PackTask, PackResult]]) -> tuple[dict[ShardEntry, Path], dict[str, tuple[Path, str]]]:
    """Return the current path of each shard, and path and digest of each table of facts or labels, by its published name."""
    numbers: Counter[str] = Counter()
    shards: dict[ShardEntry, Path] = {}
    tables: dict[str, tuple[Path, str]] = {}

    def name(begin: str) -> str:
        numbers[begin] += 1
        return f"{begin}-{numbers[begin] - 1:05d}.arrow"

    for task, result in packed:
        for shard in result.shards:
            counts = {key: value for key, value in shard.items() if key != "name"}
            path = name(f"{task.split}/{task.source}")
            shards[ShardEntry(path=path, split=task.split, source=task.source, **counts)] = task.output / shard["name"]
        if result.facts_sha256:
            tables[name(f"{DOCUMENTS}/{task.source}")] = (data_path(task.output / DOCUMENTS), result.facts_sha256)
        if result.labels_sha256:
            tables[name(f"{LABELS}/{task.split}-{task.source}")] = (data_path(task.output / LABELS), result.labels_sha256)
    return shards, tables
