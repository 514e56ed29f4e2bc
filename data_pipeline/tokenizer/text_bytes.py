"""Counts bytes of text by id, to compare losses of different tokenizers per byte. Shape suffixes: V the vocabulary, T ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.tokenizer.base import ByteTokenizer, Tokenizer
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer

_UNREADABLE = "\ufffd"
_BYTE_ALPHABET = {chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))}
"""The characters that stand for the 256 bytes in byte-level vocabularies (`bytes_to_unicode` of GPT-2)."""


@dataclass(frozen=True)
class TextBytes:
    """Bytes of UTF-8 that each id adds to the decoded text: none for special ids, nor for unk, whose text is lost."""

    first_V: NDArray[np.int64]  # at the start of a text, where many tokenizers remove an added space
    inner_V: NDArray[np.int64]

    def count(self, ids_T: NDArray[np.int64], *, is_first_T: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the bytes of each id, in the shape of `ids_T`. `is_first_T` is true at the start of a text."""
        return np.where(is_first_T, self.first_V[ids_T], self.inner_V[ids_T])


def count_text_bytes(tokenizer: Tokenizer) -> TextBytes:
    """Decode each id twice. The name of a part of a character tells its bytes: `<0xE2>` is one, byte-level names have one each."""
    names = _byte_level_names(tokenizer)
    single_bytes = {tokenizer.token_id(f"<0x{byte:02X}>") for byte in range(128, 256)}
    first_V, inner_V = (np.zeros(tokenizer.vocab_size, np.int64) for _ in range(2))
    for number in range(tokenizer.vocab_size):
        text = tokenizer.decode([number])
        if text and number == tokenizer.unk_id:
            continue
        if number not in names:
            if _UNREADABLE in text and (number in single_bytes or isinstance(tokenizer, ByteTokenizer)):
                first_V[number] = inner_V[number] = 1
            else:
                first_V[number] = len(text.encode())
                inner_V[number] = len(tokenizer.decode([number, number]).encode()) - first_V[number]
        elif text:
            is_bytes = _BYTE_ALPHABET.issuperset(names[number])
            first_V[number] = inner_V[number] = len(names[number]) if is_bytes else len(names[number].encode())
    return TextBytes(first_V, inner_V)


def _byte_level_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of all ids if each of their characters is a byte; else nothing."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    content = json.loads(tokenizer.to_bytes())
    decoder = content.get("decoder") or {}
    if "ByteLevel" not in {part["type"] for part in (decoder, *decoder.get("decoders", ())) if part}:
        return {}
    vocabulary: Mapping[str, int] | list[tuple[str, float]] = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: pieces with scores, in the order of their ids
        vocabulary = {name: number for number, (name, _) in enumerate(vocabulary)}
    added: list[Mapping[str, Any]] = content.get("added_tokens", [])
    return {number: name for name, number in vocabulary.items()} | {token["id"]: token["content"] for token in added}
