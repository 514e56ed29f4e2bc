"""Prepared data whose validation rows have several sources, kinds and lengths, for tests of the evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.files import digest_file, write_atomic
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import Manifest, ShardEntry
from data_pipeline.dataset.shards import ShardContent, write_shard
from data_pipeline.tokenizer import ByteTokenizer

ROW_LENGTH = 32
_KINDS = {"a": "prose", "b": "code", "c": "prose"}
_SEGMENTS = {
    "a": [[32], [2, 3, 5, 20], [17, 9]],
    "b": [[1, 4, 8, 16], [31]],
    "c": [[6, 6, 6, 6, 6], [2, 2, 2], [12, 16], [32], [24, 8]],
}
_TEXT = b"the cat sat on a mat and the dog ran to it while birds sang of old ships at sea "


def write_grouped(directory: Path) -> Path:
    """Write rows of three sources of two kinds, in pieces of 1 to 32 tokens, the same for both splits. Return `directory`."""
    tokenizer = ByteTokenizer()
    shards = [_shard(directory, split, source, tokenizer) for split in ("train", "val") for source in _KINDS]
    (directory / "tokenizer").mkdir(exist_ok=True)
    (directory / "tokenizer" / tokenizer.file_name).write_bytes(tokenizer.to_bytes())
    _, data = Manifest(
        fingerprint="",
        row_length=ROW_LENGTH,
        vocab_size=tokenizer.vocab_size,
        token_type="uint16",
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=tuple(_KINDS),
        shards=tuple(shards),
        files={},
        inputs=(),
        partitions=(),
        config={},
        totals={"sources": {name: {"kind": kind} for name, kind in _KINDS.items()}},
    ).sealed()
    write_atomic(directory / MANIFEST, data)
    return directory


def _shard(directory: Path, split: str, source: str, tokenizer: ByteTokenizer) -> ShardEntry:
    path = directory / split / f"{source}-00000.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _SEGMENTS[source]
    tokens_RL = np.full((len(rows), ROW_LENGTH), tokenizer.pad_id, np.uint16)
    for row, lengths in enumerate(rows):
        text = (_TEXT * 2)[row : row + sum(lengths)].decode()
        tokens_RL[row, : sum(lengths)] = tokenizer.encode(text)
    segments = [length for lengths in rows for length in lengths]
    counts = np.array([len(lengths) for lengths in rows], np.int64)
    content = ShardContent(tokens_RL, np.array(segments, np.uint32), np.arange(len(segments), dtype=np.uint64), counts)
    write_shard(path, content)
    return ShardEntry(
        path=str(path.relative_to(directory)),
        split=split,
        source=source,
        rows=len(rows),
        tokens=content.num_tokens,
        targets=content.num_targets,
        bytes=path.stat().st_size,
        sha256=digest_file(path),
    )
