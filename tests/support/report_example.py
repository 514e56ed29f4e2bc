"""A report of a preparation that has every part, with its manifest and timings, for tests of code that shows reports."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import numpy as np

from data_pipeline.config import PrepareConfig, portable_settings
from data_pipeline.dataset.manifest import Manifest, ShardEntry
from data_pipeline.reports.lengths import compare_row_lengths, describe_lengths

HOSTILE = "</pre><script>alert('x')</script> \u202egnp.exe\x1b[2J \ud800 | `code` ${x} --> ]]> <img src=x onerror=alert(1)>"
"""Text that tries to break out of the element in which it is shown."""

_ROW_LENGTH = 1024


def example_report(size: int = 20_000) -> dict[str, Any]:
    """Return the report of a corpus with `size` kept documents, in the form of `report.json`."""
    lengths = np.random.default_rng(7).lognormal(6.1, 1.1, size).astype(np.int64) + 12
    tokens, characters = _counted(lengths), _counted(lengths * 4 + lengths % 7)
    stages = [
        ("read", {"not-json": 41, "invalid-utf8": 17, "line-too-long": 2}),
        ("judge", {"too-short": 1930, "language": 2214, "repeated-lines": 655, "symbol-ratio": 120}),
        ("deduplicate", {"exact-duplicate": 1412, "near-duplicate": 2873, "benchmark-overlap": 9}),
        ("quality", {"perplexity-high": 611, "perplexity-low": 127, "classified-bad": 318}),
        ("balance", {"over-share": 480}),
    ]
    lost = sum(sum(reasons.values()) for _, reasons in stages)
    return {
        "documents": _documents(size + lost, size),
        "stages": _funnel(stages, size + lost),
        "rejected": dict(stages),
        "samples": [
            _sample("read", "not-json", "web", 17, "Expecting value: line 1 column 9", '{"text": broken'),
            _sample("judge", "too-short", "web", 203, "11 characters, fewer than 20", "Click here."),
            _sample(
                "deduplicate", "near-duplicate", "books", 5, "like books, shelf/a.txt, line 1", "It was a bright cold day\nin April"
            ),
            _sample("judge", "language", HOSTILE, 9, HOSTILE, HOSTILE),
        ],
        "ignored": {"unknown-format": {".pdf": 2_700, ".docx": 68}, "empty": {".txt": 3}},
        "malformed": {"not-json": {".jsonl.gz": 41}, "invalid-utf8": {".txt": 17}, "line-too-long": {".jsonl": 2}},
        "cleaned": {"unicode": 812, "mojibake": 44, "line-endings": 3021, "html": 9120},
        "sources": {
            "web": _source("web", 19_400, 11_000, 3.9, weight=1.0, share=0.48, lost={"near-duplicate": 2800, "language": 2100}),
            "books": _source("prose", 7_200, 6_500, 4.4, weight=0.6, share=0.32, lost={"too-short": 500}),
            "code": _source(
                "code", size + lost - 26_600, size - 17_500, 3.1, weight=0.4, share=0.20, lost={"exact-duplicate": 900}
            ),
        },
        "languages": {
            "en": {"documents": 14_000, "bytes": 41_000_000, "tokens": 9_400_000, "bytes_per_token": 4.36},
            "de": {"documents": 3_100, "bytes": 9_000_000, "tokens": 2_700_000, "bytes_per_token": 3.33},
            "hi": {"documents": 400, "bytes": 2_100_000, "tokens": 910_000, "bytes_per_token": 2.31},
        },
        "language_confidence": {
            "en": {"0.5": 14_900, "0.8": 14_500, "0.9": 14_000, "0.95": 13_100, "0.99": 9_800, "all": 15_000},
            "de": {"0.5": 3_350, "0.8": 3_240, "0.9": 3_100, "0.95": 2_800, "0.99": 1_500, "all": 3_400},
        },
        "lengths": {"characters": describe_lengths(characters), "tokens": describe_lengths(tokens)},
        "truncation": compare_row_lengths(tokens, _ROW_LENGTH),
        "duplicates": {
            "exact": 1412,
            "near": 2873,
            "benchmark": 9,
            "clusters": [
                {
                    "size": 812,
                    "leader": {"source": "web", "path": "b/part-3.jsonl", "line": 88},
                    "sample": "We value your privacy.",
                },
                {"size": 97, "leader": {"source": "code", "id": 4294967303}, "sample": HOSTILE},
            ],
            "lost_share_by_source": {"web": 0.181, "books": 0.02, "code": 0.11},
            "alarms": ["web"],
            "benchmark_share_by_source": {"web": 0.06, "books": 0.0, "code": 0.0},
            "benchmark_alarms": ["web"],
        },
        "perplexity": {
            "by_source": {"web": {"p5": 41.2, "p50": 183.0, "p95": 890.5}, "books": {"p5": 52.0, "p50": 120.4, "p95": 300.1}},
            "histogram": [[low, high, int(9000 * np.exp(-((i - 14) ** 2) / 26))] for i, (low, high) in enumerate(_bins())],
            "thresholds": {"web": {"min": 20.0, "max": 1000.0}, "books": {"min": None, "max": 1000.0}},
        },
        "classifier": {"accuracy": 0.942, "good_examples": 500, "bad_examples": 430, "threshold": 0.5},
        "augmentation": {"fill-in-the-middle": 1210, "synonyms": 88},
        "rows": {
            "train": _rows(12_466, 0.9997, documents=19_000, cut=4_190, repeated=8_040),
            "val": _rows(655, 0.9981, documents=1_000, cut=221, repeated=400),
        },
        "packing_methods": {
            "best-fit": {"fill_rate": 0.9997, "cut_rate": 0.2205},
            "greedy": {"fill_rate": 0.99999, "cut_rate": 0.6412},
            "one-per-row": {"fill_rate": 0.5594, "cut_rate": 0.2205},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": 32_000, "digest": "sha256:" + "5a" * 32, "round_trip_failures": 0, "unknown": 0},
    }


def example_manifest(report: dict[str, Any]) -> Manifest:
    """Return a manifest that fits such a report."""
    shards = tuple(
        ShardEntry(
            f"{split}/{source}-00000.arrow", split, source, rows, rows * 1023, rows * 1020, rows * 2300, "sha256:" + "0b" * 32
        )
        for split, rows in (("train", 4155), ("val", 218))
        for source in ("web", "books", "code")
    )
    config = portable_settings(PrepareConfig(sources=("a",), row_length=_ROW_LENGTH))
    config["language"] |= {"keep": ["en", "de", "hi"], "min_confidence": 0.9}
    return Manifest(
        fingerprint="sha256:" + "1c" * 32,
        row_length=_ROW_LENGTH,
        vocab_size=32_000,
        token_type="uint16",
        tokenizer_kind="bpe",
        tokenizer_digest="sha256:" + "5a" * 32,
        sources=("web", "books", "code"),
        shards=shards,
        files={"report.json": "sha256:" + "2d" * 32},
        inputs=tuple(
            {"source": source, "path": f"part-{number}.jsonl", "bytes": 1_000_000 * number, "sha256": f"sha256:{number:064x}"}
            for source in ("web", "books", "code")
            for number in (1, 2)
        ),
        partitions=({"source": "web", "parts": [{"path": "part-1.jsonl", "start": 0, "end": 1_000_000}]},),
        config=config,
        totals=report,
        root_digest="sha256:" + "3e" * 32,
    )


def example_timings() -> dict[str, Any]:
    """Return the content of `timings.json` of a run that found part of the reading already done."""
    return {
        "seconds": 41.5,
        "stages": [
            {"name": "read", "bytes": 61_000_000, "bytes_done_before": 20_000_000, "seconds": 14.2},
            {"name": "train", "bytes": 32_000_000, "bytes_done_before": 0, "seconds": 11.0},
            {"name": "tokenize", "bytes": 70_000_000, "bytes_done_before": 0, "seconds": 12.1},
            {"name": "pack", "bytes": 26_000_000, "bytes_done_before": 0, "seconds": 4.2},
        ],
    }


def thinned(value: Any, chance: random.Random) -> Any:
    """Return the value with random parts removed or set to None, as in reports of other settings and versions."""
    if not isinstance(value, dict):
        return value
    kept = {key: thinned(item, chance) for key, item in value.items() if chance.random() > 0.15}
    return {key: None if isinstance(item, dict) and chance.random() < 0.1 else item for key, item in kept.items()}


def _counted(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, int]:
    values, counts = np.unique(lengths, return_counts=True)
    return {str(value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)}


def _documents(read: int, kept: int) -> dict[str, int]:
    val = kept // 20
    sizes = {"input_bytes": read * 3100, "text_bytes": kept * 3050}
    return {"read": read, "kept": kept, "train": kept - val, "val": val, "rejected": read - kept, **sizes}


def _funnel(stages: list[tuple[str, dict[str, int]]], read: int) -> list[dict[str, Any]]:
    funnel = []
    for name, reasons in stages:
        left = read - sum(reasons.values())
        funnel.append({"name": name, "in": read, "out": left, "rejected": reasons})
        read = left
    return funnel


def _sample(stage: str, reason: str, source: str, line: int, detail: str, text: str) -> dict[str, Any]:
    return {
        "stage": stage, "reason": reason, "source": source, "path": "part-1.jsonl", "line": line, "detail": detail, "sample": text,
    }  # fmt: skip


def _source(
    kind: str, read: int, kept: int, bytes_per_token: float, weight: float, share: float, lost: dict[str, int]
) -> dict[str, Any]:
    documents = _documents(read, kept)
    tokens = round(documents["text_bytes"] / bytes_per_token)
    return {
        "kind": kind,
        "documents": documents,
        "tokens": tokens,
        "bytes_per_token": bytes_per_token,
        "weight": weight,
        "train_tokens": round(tokens * 0.95),
        "share": share,
        "rejected": lost,
    }


def _rows(rows: int, fill_rate: float, documents: int, cut: int, repeated: int) -> dict[str, Any]:
    tokens = round(rows * _ROW_LENGTH * fill_rate)
    return {
        "rows": rows,
        "tokens": tokens,
        "targets": tokens - documents,
        "padding": rows * _ROW_LENGTH - tokens,
        "fill_rate": fill_rate,
        "documents": documents,
        "cut_documents": cut,
        "cut_rate": round(cut / documents, 6),
        "repeated_tokens": repeated,
    }


def _bins() -> list[tuple[float, float]]:
    borders = [round(float(border), 2) for border in np.geomspace(8, 8000, 31)]
    return list(pairwise(borders))
