"""What `verify` and `inspect` do: checks prepared data against its manifest, and shows what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipeline.errors import PreparedDataError
from data_pipeline.files import digest_file
from data_pipeline.manifest import Manifest, read_manifest

__all__ = ["describe", "summarise", "verify"]


def verify(directory: Path) -> Manifest:
    """Reads every file of prepared data and compares its digest with the manifest's.

    Raises:
        PreparedDataError: the manifest or a file is missing or changed; the message names the first one.
    """
    manifest = read_manifest(directory)
    digests = {shard.path: shard.sha256 for shard in manifest.shards} | manifest.files
    for name, expected in digests.items():
        path = directory / name
        if not path.is_file():
            raise PreparedDataError(f"{path}: missing; run `prepare` again")
        if (found := digest_file(path)) != expected:
            raise PreparedDataError(f"{path}: {found}, but the manifest says {expected}; the file was changed: run `prepare` again")
    return manifest


def summarise(manifest: Manifest) -> dict[str, Any]:
    """What a person or a program wants to know about prepared data, in plain values."""
    return {
        "root_digest": manifest.root_digest,
        "row_length": manifest.row_length,
        "tokenizer": {
            "kind": manifest.tokenizer_kind,
            "vocab_size": manifest.vocab_size,
            "digest": manifest.tokenizer_digest,
            "bytes_per_token": round(manifest.totals["documents"]["text_bytes"] / max(manifest.totals["tokens"]["total"], 1), 3),
        },
        "shards": [
            {
                "split": split,
                "source": source,
                "shards": len(shards),
                **{name: sum(getattr(shard, name) for shard in shards) for name in ("rows", "tokens", "targets", "bytes")},
            }
            for split in ("train", "val")
            for source in manifest.sources
            if (shards := [shard for shard in manifest.shards if (shard.split, shard.source) == (split, source)])
        ],
        "totals": manifest.totals,
    }


def describe(summary: dict[str, Any]) -> str:
    """The summary as a page of text."""
    documents, totals, tokenizer = summary["totals"]["documents"], summary["totals"], summary["tokenizer"]
    rejected = [
        f"{count:,} {reason}"
        for stage in totals["rejected"].values()
        for reason, count in sorted(stage.items(), key=lambda i: -i[1])
    ]
    lines = [
        f"root digest  {summary['root_digest']}",
        f"tokenizer    {tokenizer['kind']}, {tokenizer['vocab_size']:,} tokens, {tokenizer['bytes_per_token']} bytes a token",
        f"documents    {documents['read']:,} read = {documents['train']:,} train + {documents['val']:,} val"
        f" + {documents['rejected']:,} rejected" + (f" ({', '.join(rejected)})" if rejected else ""),
        *(
            f"{name:<12} "
            + ", ".join(f"{key} {totals[name][key]:,}" for key in ("mean", "p50", "p90", "p95", "p99", "max"))
            + " a document"
            for name in ("characters", "tokens")
        ),
        "",
        _table(summary["shards"], ("split", "source", "shards", "rows", "tokens", "targets", "bytes")),
        "",
        _table(
            [{"split": split, **rows} for split, rows in totals["rows"].items()],
            ("split", "rows", "fill_rate", "padding", "documents", "cut_documents", "cut_rate", "repeated_tokens"),
        ),
        f"\nrows of {summary['row_length']} tokens",
    ]
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> str:
    cells = [[column.replace("_", " ") for column in columns]]
    cells += [[f"{row[column]:,}" if isinstance(row[column], int | float) else row[column] for column in columns] for row in rows]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in ("split", "source") else cell.rjust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    )
