"""Converts an exported directory to GGUF with the converter of llama.cpp, and tells it what it cannot find out.

    python examples/convert_to_gguf.py LLAMA_CPP EXPORTED --outfile model.gguf --outtype f32

LLAMA_CPP is the folder of `convert_hf_to_gguf.py`. Options after EXPORTED are those of the converter. It needs `transformers`.

The converter looks up the expression that divides a text by a digest of the ids of one text. These ids are those of a published
vocabulary, so a vocabulary that was trained on other text is never found. Here the expression itself is compared. The converter
also assumes that a SentencePiece model adds a space before a text.
"""

from __future__ import annotations

import json
import runpy
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_SUFFIX, _TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
# The names in `src/llama-vocab.cpp` of llama.cpp, by expression.
NAMES = {
    rf"{_SUFFIX}{_WORD}\p{{N}}{{1,3}}{_TAIL}": "llama-bpe",
    rf"{_SUFFIX}{_WORD}\p{{N}}{_TAIL}": "qwen2",
}


def pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """Return the name that llama.cpp has for the division of a text by this `tokenizer.json`."""
    part = tokenizer["pre_tokenizer"] or {"type": "nothing"}
    parts = part["pretokenizers"] if part["type"] == "Sequence" else [part]
    splits = [one["pattern"].get("Regex") for one in parts if one["type"] == "Split" and not one["invert"]]
    levels = [one for one in parts if one["type"] == "ByteLevel" and not one["add_prefix_space"]]
    if not tokenizer["model"].get("merges"):
        sys.exit("tokenizer.json has no merges, which llama.cpp needs; train with a tokenizer of kind bpe")
    if len(levels) == 1 and len(splits) + len(levels) == len(parts) and tokenizer["normalizer"] in (None, {"type": "NFC"}):
        if levels[0]["use_regex"] and not splits:
            return "gpt-2"
        if len(splits) == 1 and not levels[0]["use_regex"] and splits[0] in NAMES:
            return NAMES[splits[0]]
    sys.exit(
        f"tokenizer.json divides a text by {json.dumps(part)[:300]}, and this program knows only GPT-2's ByteLevel and the "
        "expressions of Llama 3 and Qwen2. If src/llama-vocab.cpp of llama.cpp has this one, add its name to NAMES here; else "
        "train with a tokenizer of kind bpe"
    )


def main(llama_cpp: Path, exported: Path) -> None:
    tokenizer = json.loads((exported / "tokenizer.json").read_bytes())
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    model: Any = import_module("conversion.base").TextModel
    if (exported / "tokenizer.model").exists():
        steps = (tokenizer["normalizer"] or {}).get("normalizers", [])
        convert = model._set_vocab_sentencepiece

        def without_prefix(self: Any, *arguments: Any, **named: Any) -> None:
            convert(self, *arguments, **named)
            self.gguf_writer.add_add_space_prefix(any(step["type"] == "Prepend" for step in steps))

        model._set_vocab_sentencepiece = without_prefix
    else:
        name = pre_tokenizer_name(tokenizer)
        model.get_vocab_base_pre = lambda _self, _tokenizer: name
    sys.argv = ["convert_hf_to_gguf.py", str(exported), *sys.argv[3:]]
    runpy.run_path(str(llama_cpp / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} LLAMA_CPP EXPORTED [options of convert_hf_to_gguf.py]")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
