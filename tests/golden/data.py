"""Prepares a fixed text and prints the digests that every machine must get: `python -m tests.golden.data > tests/golden/data.json`.

The digests change only with the format, `PIPELINE_VERSION`, the settings below, or a library that decides bytes (sentencepiece,
pyarrow). Such a change needs an entry in the changelog. Unigram is left out, because its training computes in floating point and
may differ between processors.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare

DIGESTS = Path(__file__).with_suffix(".json")


def write_text(folder: Path) -> Path:
    """Write 200 documents of arithmetic in words, as JSON Lines and plain text. The bytes are the same with any Python."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = []
    for number in range(200):
        digits = [words[(number * 7 + place * place) % 10] for place in range(3 + number * number % 41)]
        texts.append(f"{number}: {' '.join(digits)}, naïve {words[number % 10]} = \u65e5\u672c\n\tend of {number}")
    (folder / "numbers").mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts[:150]]
    (folder / "numbers" / "a.jsonl").write_bytes("".join(lines).encode())
    for number, text in enumerate(texts[150:]):
        (folder / "numbers" / f"{number:02d}.txt").write_bytes(text.encode())
    return folder / "numbers"


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Return the root digest and the tokenizer digest for each kind of tokenizer and each packing method."""
    source = write_text(folder)
    found = {}
    for kind, method in (("bpe", "best-fit"), ("bpe", "greedy"), ("char", "best-fit"), ("byte", "best-fit")):
        config = PrepareConfig(
            sources=(str(source),),
            output=folder / f"{kind}-{method}",
            workers=1,
            row_length=48,
            partition_bytes=2048,
            tokenizer={"kind": kind, "vocab_size": 320},
            packing={"method": method, "window_tokens": 1024, "shard_bytes": 4096},
        )
        manifest = prepare(config)
        found[f"{kind}, {method}"] = {"root": manifest.root_digest, "tokenizer": manifest.tokenizer_digest}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        json.dump(digests(Path(temporary)), sys.stdout, indent=2)
        print()
