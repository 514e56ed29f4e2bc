from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from data_pipeline.config import PrepareConfig
from data_pipeline.dataset.splits import SPLITS, Split
from data_pipeline.dedup.duplicates import Duplicates
from data_pipeline.documents import Reason, Stage, partition_of
from data_pipeline.execution.tasks import Counts, add_counts
from data_pipeline.packing.placement import METHODS
from data_pipeline.quality.perplexity import SCORE_STEPS, Bounds, perplexity
from data_pipeline.reports.lengths import at_percents, compare_row_lengths, describe_lengths, share_of
from data_pipeline.sources.inputs import Partition
from data_pipeline.stages.pack import PackResult
from data_pipeline.stages.read import ReadResult
from data_pipeline.stages.rejects import collect_rejects, lines_before
from data_pipeline.stages.select import SelectResult
from data_pipeline.stages.split import SplitResult, share_lost_to_benchmarks
from data_pipeline.stages.tokenize import TokenizeResult

_SHOWN_SAMPLES_PER_REASON = 3
_BIN_STEPS = SCORE_STEPS // 4


@dataclass(frozen=True)
class Results:
    partitions: Sequence[Partition]
    read: Sequence[ReadResult]
    duplicates: Duplicates
    split: Sequence[SplitResult]
    tokenized: Sequence[TokenizeResult]
    bounds: Mapping[str, Bounds]
    selected: Sequence[SelectResult]
    packed: Sequence[tuple[Split, PackResult]]


def make_report(results: Results, config: PrepareConfig) -> dict[str, Any]:
    """Return the entries about several stages together, without times, because the report is reproducible."""
    everything = range(len(results.partitions))
    sources = {
        source: [number for number in everything if results.partitions[number].source == source]
        for source in dict.fromkeys(partition.source for partition in results.partitions)
    }
    documents = _documents(results, everything)
    assert documents["read"] == documents["kept"] + documents["rejected"], "a document was neither kept nor rejected"
    lengths = add_counts(result.lengths for result in results.selected)
    tokens_trained_on = sum(result.tokens["train"] for result in results.selected)
    rejected = _rejected(results, everything)
    stages, left = [], documents["read"]
    for name, counts in rejected.items():
        stages.append({"name": name, "in": left, "out": left - sum(counts.values()), "rejected": counts})
        left -= sum(counts.values())
    lost = share_lost_to_benchmarks(results.read, results.split)
    lines = lines_before(results.partitions, results.read)
    clusters = []
    for cluster in results.duplicates.clusters:
        leader, number = cluster["leader"], partition_of(cluster["leader"]["id"])
        place = {"source": results.partitions[number].source, "line": leader["line"] + lines[number]}  # from the start of the file
        clusters.append(cluster | {"leader": leader | place})
    return {
        "documents": documents,
        "stages": stages,
        "rejected": rejected,
        "samples": list(collect_rejects(results.partitions, results.read, results.selected, most=_SHOWN_SAMPLES_PER_REASON)),
        "sources": {name: _source(results, numbers, config, name, tokens_trained_on) for name, numbers in sources.items()},
        "lengths": {
            "characters": describe_lengths(add_counts(result.characters for result in results.selected)),
            "tokens": describe_lengths(lengths),
        },
        "truncation": compare_row_lengths(lengths, config.row_length),
        "duplicates": results.duplicates.report
        | {
            "clusters": clusters,
            "benchmark_share_by_source": {source: round(share, 6) for source, share in lost.items()},
            "benchmark_alarms": [source for source, share in lost.items() if share > config.dedup.benchmark_alarm_fraction],
        },
        "perplexity": _perplexity(results, sources, config.quality.trusted),
        **row_counts(results.packed, config.row_length),
    }


def row_counts(packed: Sequence[tuple[Split, PackResult]], row_length: int) -> dict[str, Any]:
    of_train = [result for side, result in packed if side == "train"]
    methods = {method: add_counts(result.methods[method] for result in of_train) for method in METHODS}
    documents = sum(result.documents for result in of_train)
    return {
        "rows": {split: _rows([result for side, result in packed if side == split], row_length) for split in SPLITS},
        "packing_methods": {
            method: {
                "rows": counts.get("rows", 0),
                "fill_rate": share_of(counts.get("tokens", 0), counts.get("rows", 0) * row_length),
                "cut_documents": counts.get("cut_documents", 0),
                "cut_rate": share_of(counts.get("cut_documents", 0), documents),
            }
            for method, counts in methods.items()
        },
    }


def _documents(results: Results, numbers: Sequence[int]) -> dict[str, int]:
    kept = add_counts(results.selected[number].kept for number in numbers)
    return {
        "read": sum(results.read[number].documents for number in numbers),
        "kept": sum(kept.values()),
        **{split: kept.get(split, 0) for split in SPLITS},
        "rejected": sum(sum(counts.values()) for counts in _rejected(results, numbers).values()),
        "input_bytes": sum(results.read[number].input_bytes for number in numbers),
        "text_bytes": sum(add_counts(results.selected[number].bytes for number in numbers).values()),
    }


def _rejected(results: Results, numbers: Sequence[int]) -> dict[str, Counts]:
    stages: dict[str, Counts] = {stage.value: {} for stage in Stage}
    by_stage = ([result.rejected for result in results.read], results.duplicates.rejected, [r.rejected for r in results.selected])
    for reason, count in add_counts(of_stage[number] for of_stage in by_stage for number in numbers).items():
        stages[Reason(reason).stage][reason] = count
    return stages


def _source(results: Results, numbers: Sequence[int], config: PrepareConfig, name: str, tokens_trained_on: int) -> dict[str, Any]:
    documents = _documents(results, numbers)
    selected = [results.selected[number] for number in numbers]
    tokens = sum(result.unique_tokens for result in selected)
    train_tokens = sum(result.tokens["train"] for result in selected)
    kinds = add_counts(result.kinds for result in selected)
    return {
        "kind": ", ".join(sorted(kinds, key=lambda kind: -kinds[kind])),
        "documents": documents,
        "tokens": tokens,
        "bytes_per_token": round(documents["text_bytes"] / max(tokens, 1), 3),
        "weight": config.weights.get(name, 1.0),
        "train_tokens": train_tokens,
        "share": share_of(train_tokens, tokens_trained_on),
        "rejected": add_counts(_rejected(results, numbers).values()),
    }


def _perplexity(results: Results, sources: Mapping[str, Sequence[int]], trusted: str | None) -> dict[str, Any]:
    """With a histogram in bins of a quarter of an octave: from, to, and the number of documents."""
    by_source = {name: add_counts(results.tokenized[number].scores for number in numbers) for name, numbers in sources.items()}
    bins: Counter[int] = Counter()
    for score, count in add_counts(by_source.values()).items():
        bins[int(score) // _BIN_STEPS] += count
    if not bins:
        return {}
    borders = [round(perplexity(number * _BIN_STEPS), 2) for number in range(min(bins), max(bins) + 2)]
    return {
        "by_source": {
            name: {key: round(perplexity(score), 1) for key, score in at_percents(scores, (5, 50, 95)).items()}
            for name, scores in by_source.items()
        },
        "histogram": [[low, high, bins[number]] for number, (low, high) in enumerate(pairwise(borders), min(bins))],
        "thresholds": {
            name: {"min": round(perplexity(bounds.min_score), 3), "max": round(perplexity(bounds.max_score), 3)}
            for name, bounds in results.bounds.items()
            if name != trusted
        },
    }


def _rows(packed: Sequence[PackResult], row_length: int) -> dict[str, Any]:
    shards = [shard for result in packed for shard in result.shards]
    rows = sum(shard["rows"] for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    documents = sum(result.documents for result in packed)
    cut = sum(result.cut_documents for result in packed)
    targets = sum(shard["targets"] for shard in shards)
    hidden = [result.targets_without_loss for result in packed if result.targets_without_loss is not None]
    masked = {"targets_without_loss": sum(hidden), "loss_share": share_of(targets, targets + sum(hidden))} if hidden else {}
    return {
        "rows": rows,
        "tokens": tokens,
        "targets": targets,
        **masked,
        "padding": rows * row_length - tokens,
        "fill_rate": share_of(tokens, rows * row_length),
        "documents": documents,
        "cut_documents": cut,
        "cut_rate": share_of(cut, documents),
        "repeated_tokens": tokens - sum(result.document_tokens for result in packed),
    }
