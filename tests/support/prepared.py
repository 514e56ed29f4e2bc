"""Small prepared data, written directly as shards, for tests of the trainer that need rows but no particular text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.files import digest_file, write_atomic
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import Manifest, ShardEntry
from data_pipeline.dataset.shards import ShardContent, write_shard
from data_pipeline.tokenizer import ByteTokenizer

_WORDS = b"the cat sat on a mat and the dog ran to it while birds sang of old ships at sea ".split()


def write_prepared(directory: Path, *, row_length: int = 32, train_rows: int = 61, val_rows: int = 9, seed: int = 0) -> Path:
    """Write rows of two documents and some padding, in two shards for training and one for validation. Return `directory`."""
    tokenizer = ByteTokenizer()
    generator = np.random.default_rng(seed)
    shards = []
    for split, name, num_rows in (
        ("train", "a", train_rows // 2),
        ("train", "b", train_rows - train_rows // 2),
        ("val", "a", val_rows),
    ):
        path = directory / split / f"{name}-00000.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = _rows(generator, tokenizer, num_rows, row_length)
        write_shard(path, content)
        shards.append(
            ShardEntry(
                path=str(path.relative_to(directory)),
                split=split,
                source=name,
                rows=num_rows,
                tokens=content.num_tokens,
                targets=content.num_targets,
                bytes=path.stat().st_size,
                sha256=digest_file(path),
            )
        )
    (directory / "tokenizer").mkdir(exist_ok=True)
    (directory / "tokenizer" / tokenizer.file_name).write_bytes(tokenizer.to_bytes())
    manifest, data = Manifest(
        fingerprint="",
        row_length=row_length,
        vocab_size=tokenizer.vocab_size,
        token_type="uint16",
        tokenizer_kind=tokenizer.kind,
        tokenizer_digest=tokenizer.digest,
        sources=("a", "b"),
        shards=tuple(shards),
        files={},
        inputs=(),
        partitions=(),
        config={},
        totals={},
    ).sealed()
    assert manifest.root_digest
    write_atomic(directory / MANIFEST, data)
    return directory


def _rows(generator: np.random.Generator, tokenizer: ByteTokenizer, num_rows: int, row_length: int) -> ShardContent:
    tokens = np.full((num_rows, row_length), tokenizer.pad_id, dtype=np.uint16)
    segments = []
    for row in range(num_rows):
        padding = int(generator.integers(0, 4))
        first = int(generator.integers(2, row_length - padding - 2))
        segments += [first, row_length - padding - first]
        text = b" ".join(generator.choice(np.array(_WORDS, dtype=object), row_length))
        ids = tokenizer.encode(text.decode())
        tokens[row, :first] = ids[:first]
        tokens[row, first : row_length - padding] = ids[: row_length - padding - first]
    return ShardContent(
        tokens, np.array(segments, np.uint32), np.arange(len(segments), dtype=np.uint64), np.full(num_rows, 2, dtype=np.int64)
    )
