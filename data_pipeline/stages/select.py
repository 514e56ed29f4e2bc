from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.config import KINDS, BalanceConfig
from data_pipeline.dataset.layout import CHOSEN, LOSS_RUNS, TOKENS
from data_pipeline.dataset.splits import SPLITS
from data_pipeline.dataset.tables import CHOSEN_SCHEMA, TableWriter, read_batches, read_side_by_side
from data_pipeline.dedup.duplicates import REASONS, Fate
from data_pipeline.documents import Reason
from data_pipeline.execution.tasks import Counts, add_counts, add_nested, commit_result
from data_pipeline.filters.judge import label_of
from data_pipeline.quality.classifier import PROBABILITY_STEPS
from data_pipeline.quality.perplexity import MAX_SCORE, Bounds, count_values, perplexity, resolve_bounds
from data_pipeline.stages.job import Job, PartitionTask
from data_pipeline.stages.pack import DocumentsOf
from data_pipeline.stages.reject_samples import LaterRejection, first_samples
from data_pipeline.stages.tokenize import WITHOUT_TOKENS, TokenizeResult
from data_pipeline.text import mix_hashes


def bounds_of_sources(job: Job, tokenized: Sequence[TokenizeResult]) -> dict[str, Bounds]:
    """Percentiles are computed over all documents of the source. What a source is not judged by has bounds that keep all."""
    found = {}
    for source, config in job.of_sources.items():
        settings = config.quality
        members = [result for partition, result in zip(job.partitions, tokenized, strict=True) if partition.source == source]
        bounds = resolve_bounds(add_counts(result.scores for result in members), settings)
        if not settings.measures_perplexity or settings.trusted == source:
            bounds = replace(bounds, min_score=0, max_score=MAX_SCORE)
        found[source] = bounds if settings.good else replace(bounds, min_probability=0)
    return found


def select_all(job: Job, tokenized: Sequence[TokenizeResult], bounds: Mapping[str, Bounds]) -> list[SelectResult]:
    sizes = [result.tokens for result in tokenized]
    balance = job.config.balance
    repeats = None
    if balance.by != "none":
        weigh = job.tasks(WeighTask, bounds=bounds)
        tokens = add_counts(result["tokens"] for result in job.run("weigh", weigh_partition, weigh, sizes, dict[str, Counts]))
        repeats = repeats_of_groups(tokens, job.config.weights, balance.max_repeats)
    return job.run("select", select_partition, job.tasks(SelectTask, bounds=bounds, repeats=repeats), sizes, SelectResult)


def documents_of(job: Job, tokenized: Sequence[TokenizeResult], selected: Sequence[SelectResult]) -> list[DocumentsOf]:
    return [
        DocumentsOf(
            partition.source,
            number,
            job.work,
            chosen.tokens,
            {TOKENS: encoded.sha256, CHOSEN: chosen.sha256},
            job.of_sources[partition.source].records.label_field,
        )
        for number, (partition, encoded, chosen) in enumerate(zip(job.partitions, tokenized, selected, strict=True))
    ]


def labels_of(selected: Sequence[SelectResult]) -> dict[str, Counts]:
    """Return the number of documents by label and split, in the order of the labels' names; empty if there are no labels."""
    names = sorted({name for result in selected for name in result.labels})
    return {name: add_counts(result.labels.get(name, {}) for result in selected) for name in names}


def report_of_selection(job: Job, selected: Sequence[SelectResult]) -> dict[str, Any]:
    languages = sorted(add_nested(result.languages for result in selected).items(), key=lambda item: (-item[1]["bytes"], item[0]))
    report: dict[str, Any] = {
        "languages": {
            language: {**counts, "bytes_per_token": round(counts["bytes"] / max(counts["tokens"], 1), 3)}
            for language, counts in languages
            if counts["documents"]
        }
    }
    if counts := labels_of(selected):
        fields = {source: config.records.label_field for source, config in job.of_sources.items()}
        report["labels"] = {"names": list(counts), "fields": fields, "documents": counts}
    return report


_TRAIN = SPLITS.index("train")


@dataclass(frozen=True)
class WeighTask(PartitionTask):
    folder = "weighed"
    bounds: Mapping[str, Bounds]


def weigh_partition(task: WeighTask) -> dict[str, Counts]:
    """Return the number of training tokens by group, as `tokens`."""
    tokens: Counter[str] = Counter()
    for batch in read_batches(task.place(TOKENS)):
        is_train_D = (reasons_of(batch, task.bounds[task.source]) == "") & (batch.column("split").to_numpy() == _TRAIN)
        lengths_D = np.diff(batch.column("tokens").offsets.to_numpy())
        for group, members_D in _groups(batch, task.source, task.config.balance):
            tokens[group] += int(lengths_D[members_D & is_train_D].sum())
    return commit_result(task, {"tokens": dict(tokens)})


@dataclass(frozen=True)
class SelectTask(PartitionTask):
    folder = CHOSEN
    bounds: Mapping[str, Bounds]
    repeats: Mapping[str, float] | None  # mean number of copies, by group; None if nothing is balanced


@dataclass
class SelectResult:
    """The selected documents of one partition. Lengths, bytes and languages count each document once, also if it has copies."""

    sha256: str = ""  # digest of the table of copies
    kept: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    tokens: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))  # tokens that go into rows, copies included
    unique_tokens: int = 0
    rejected: Counts = field(default_factory=dict)
    characters: Counts = field(default_factory=dict)  # number of documents by their length in characters
    lengths: Counts = field(default_factory=dict)  # number of documents by their length in tokens, bos and eos included
    languages: dict[str, Counts] = field(default_factory=dict)  # documents, bytes and tokens by language
    kinds: Counts = field(default_factory=dict)
    first_rejects: list[dict[str, Any]] = field(default_factory=list)  # duplicates too: see `first_samples`
    offered: Counts = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))  # number of documents to select from
    labels: dict[str, Counts] = field(default_factory=dict)  # documents by label and split; empty if the source has no labels


def select_partition(task: SelectTask) -> SelectResult:
    """Write the number of copies of each document, one row for each row of the token table."""
    result, bounds = SelectResult(), task.bounds[task.source]
    rejected: Counter[str] = Counter()
    with TableWriter(task.output, CHOSEN_SCHEMA) as table:
        for batch in read_batches(task.place(TOKENS)):
            copies_D = _copies(batch, task)
            reason_D = reasons_of(batch, bounds, copies_D)
            rejected.update(reason_D[reason_D != ""].tolist())
            _count(batch, copies_D, task.config.records.label_field, result)
            table.write(pa.RecordBatch.from_arrays([pa.array(copies_D)], schema=CHOSEN_SCHEMA))
    result.rejected = dict(rejected)
    result.first_rejects = [*first_samples(task, duplicates_of(task)), *first_samples(task, not_selected(task, bounds))]
    result.sha256 = table.digest
    return commit_result(task, result, table.written)


def _copies(batch: pa.RecordBatch, task: SelectTask) -> NDArray[np.uint8]:
    is_good_D = reasons_of(batch, task.bounds[task.source]) == ""
    copies_D: NDArray[np.uint8] = is_good_D.astype(np.uint8)
    if task.repeats is not None:
        ids_D = batch.column("id").to_numpy()
        is_train_D = batch.column("split").to_numpy() == _TRAIN
        for group, members_D in _groups(batch, task.source, task.config.balance):
            taken_D = members_D & is_train_D & is_good_D
            copies_D[taken_D] = copies_of_documents(ids_D[taken_D], task.repeats.get(group, 0.0), task.config.split.seed)
    return copies_D


def duplicates_of(task: PartitionTask) -> Iterator[LaterRejection]:
    for batch in read_batches(task.place("duplicates")):
        dropped = batch.filter(pa.array(batch.column("fate").to_numpy() > 0))
        columns = (dropped.column(name).to_pylist() for name in ("id", "fate", "leader"))
        for identity, fate, leader in zip(*columns, strict=True):
            reason = REASONS[Fate(fate)]
            yield LaterRejection(identity, reason, "" if leader == identity else f"like document {leader}", leader)


def not_selected(task: PartitionTask, bounds: Bounds) -> Iterator[LaterRejection]:
    for batch, chosen in read_side_by_side(task.place(TOKENS), task.place(CHOSEN)):
        reason_D = reasons_of(batch, bounds, chosen.column("copies").to_numpy())
        for row in np.flatnonzero(reason_D != "").tolist():
            identity = batch.column("id")[row].as_py()
            yield LaterRejection(identity, reason_D[row], explain_selection(batch, row, reason_D[row]), identity)


def explain_selection(batch: pa.RecordBatch, row: int, reason: Reason) -> str:
    if reason in (Reason.PERPLEXITY_LOW, Reason.PERPLEXITY_HIGH):
        return f"perplexity {perplexity(batch.column('perplexity')[row].as_py()):.1f}"
    if reason is Reason.CLASSIFIED_BAD:
        return f"probability of being wanted {batch.column('wanted')[row].as_py() / PROBABILITY_STEPS:.3f}"
    if reason is Reason.EQUAL_IDS:
        return "the tokenizer gives both answers of the pair the same ids"
    return ""


def _count(batch: pa.RecordBatch, copies_D: NDArray[np.uint8], label_field: str | None, result: SelectResult) -> None:
    split_D = batch.column("split").to_numpy()
    tokens_D = np.diff(batch.column("tokens").offsets.to_numpy())
    bytes_D = batch.column("bytes").to_numpy()
    kept_D = copies_D > 0
    for number, split in enumerate(SPLITS):
        side_D = kept_D & (split_D == number)
        result.offered[split] += int((split_D == number).sum())
        result.kept[split] += int(side_D.sum())
        result.bytes[split] += int(bytes_D[side_D].sum())
        result.tokens[split] += int((tokens_D * copies_D)[side_D].sum())
    result.unique_tokens += int(tokens_D[kept_D].sum())
    result.characters = add_counts([result.characters, count_values(batch.column("characters").to_numpy()[kept_D])])
    result.lengths = add_counts([result.lengths, count_values(tokens_D[kept_D])])
    for language, members_D in _members(batch.column("language")):
        counts = result.languages.setdefault(language, {"documents": 0, "bytes": 0, "tokens": 0})
        counts["documents"] += int((members_D & kept_D).sum())
        counts["bytes"] += int(bytes_D[members_D & kept_D].sum())
        counts["tokens"] += int(tokens_D[members_D & kept_D].sum())
    for kind, count in Counter(batch.column("kind").to_numpy()[kept_D].tolist()).items():
        result.kinds[KINDS[kind]] = result.kinds.get(KINDS[kind], 0) + count
    if label_field is not None:
        for metadata, number in zip(batch.column("metadata").filter(kept_D).to_pylist(), split_D[kept_D].tolist(), strict=True):
            result.labels.setdefault(label_of(metadata, label_field), dict.fromkeys(SPLITS, 0))[SPLITS[number]] += 1


def reasons_of(batch: pa.RecordBatch, bounds: Bounds, copies_D: NDArray[np.uint8] | None = None) -> NDArray[np.object_]:
    """Return "" for a document that is not rejected. `copies_D` is how often it is used; None: as often as it is good."""
    reasons_D: NDArray[np.object_] = np.full(batch.num_rows, "", np.object_)
    scores_D = batch.column("perplexity").to_numpy()
    reasons_D[batch.column("wanted").to_numpy() < bounds.min_probability] = Reason.CLASSIFIED_BAD
    reasons_D[scores_D > bounds.max_score] = Reason.PERPLEXITY_HIGH
    reasons_D[scores_D < bounds.min_score] = Reason.PERPLEXITY_LOW
    is_empty_D = np.diff(batch.column("tokens").offsets.to_numpy()) == 0
    reasons_D[is_empty_D] = Reason.NO_TOKENS  # it cannot be placed in a row
    if LOSS_RUNS in batch.schema.names:
        num_runs_D = np.diff(batch.column(LOSS_RUNS).offsets.to_numpy())
        reasons_D[is_empty_D] = np.array(WITHOUT_TOKENS, np.object_)[num_runs_D[is_empty_D]]
    if copies_D is not None:
        reasons_D[(reasons_D == "") & (copies_D == 0)] = Reason.OVER_SHARE
    return reasons_D


def _groups(batch: pa.RecordBatch, source: str, balance: BalanceConfig) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    if balance.by == "source":
        yield source, np.ones(batch.num_rows, np.bool_)
    elif balance.by == "kind":
        kinds_D = batch.column("kind").to_numpy()
        yield from ((KINDS[kind], kinds_D == kind) for kind in np.unique(kinds_D).tolist())
    elif balance.by == "language":
        yield from _members(batch.column("language"))
    else:
        metadata = (json.loads(text) if text else {} for text in batch.column("metadata").to_pylist())
        yield from _members(pa.array([str(fields.get(balance.field, "")) for fields in metadata], pa.string()))


def _members(column: pa.Array) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    encoded = column.dictionary_encode()
    numbers_D = encoded.indices.to_numpy()
    yield from ((value, numbers_D == number) for number, value in enumerate(encoded.dictionary.to_pylist()))


def repeats_of_groups(tokens: Mapping[str, int], weights: Mapping[str, float], max_repeats: float) -> dict[str, float]:
    """Return mean copies of the documents, up to `max_repeats` for the group with the fewest tokens for its weight (1 if unset)."""
    wanted = {group: weights.get(group, 1.0) for group, count in tokens.items() if count}
    scale = min((max_repeats * tokens[group] / weight for group, weight in wanted.items() if weight), default=0.0)
    return {group: scale * weight / tokens[group] for group, weight in wanted.items()}


def copies_of_documents(ids_D: NDArray[np.uint64], repeats: float, seed: int) -> NDArray[np.uint8]:
    """Return numbers with mean `repeats`, by the document's id and the seed alone."""
    whole = math.floor(repeats)
    fractions_D = (mix_hashes(ids_D + mix_hashes(np.array([seed], np.uint64))) >> np.uint64(11)) * 2.0**-53
    return (whole + (fractions_D < repeats - whole)).astype(np.uint8)
