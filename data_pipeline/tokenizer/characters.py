"""Tokenizers that need no model: characters and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.base import NUM_SPECIAL, SPECIAL_IDS, UNK_ID, Encoded, Tokenizer

__all__ = ["ByteTokenizer", "CharacterTokenizer"]


class CharacterTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of the alphabet; then the further special tokens."""

    kind = "char"
    file_name = "characters.json"

    def __init__(self, alphabet: str, extra: Sequence[str] = ()) -> None:
        self._alphabet = alphabet
        self._extra = tuple(extra)
        # A table over all code points up to the highest known one; what lies beyond it is unknown too.
        codes = np.frombuffer(alphabet.encode("utf-32-le"), np.uint32)
        self._id_of_code = np.full(int(codes.max(initial=0)) + 2, UNK_ID, np.int32)
        self._id_of_code[codes] = np.arange(NUM_SPECIAL, NUM_SPECIAL + len(codes), dtype=np.int32)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return NUM_SPECIAL + len(self._alphabet) + len(self._extra)

    @property
    def digest(self) -> str:
        """`sha256:…` over kind, alphabet and special ids."""
        return digest_bytes(self.to_bytes())

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts in one array, without bos and eos; unk for characters outside the alphabet."""
        codes_T = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        ids_T = self._id_of_code[np.minimum(codes_T, len(self._id_of_code) - 1)]
        return Encoded(ids_T, np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts))))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, U+FFFD for unk; other special ids stand for no text."""
        known = range(NUM_SPECIAL, NUM_SPECIAL + len(self._alphabet))
        return "".join("\ufffd" if i == UNK_ID else self._alphabet[i - NUM_SPECIAL] for i in ids if i == UNK_ID or i in known)

    def files(self) -> dict[str, bytes]:
        """Canonical JSON with the alphabet."""
        content: dict[str, Any] = {"kind": self.kind, "pieces": self._alphabet, "special": SPECIAL_IDS}
        return {self.file_name: canonical_json(content | _if_any(self._extra))}

    def token_id(self, name: str) -> int | None:
        """The id of a special token; none where there is no such token."""
        return NUM_SPECIAL + len(self._alphabet) + self._extra.index(name) if name in self._extra else None


class ByteTokenizer(Tokenizer):
    """One id for each of the 256 bytes of UTF-8; then the further special tokens."""

    kind = "byte"
    file_name = "bytes.json"

    def __init__(self, extra: Sequence[str] = ()) -> None:
        self._extra = tuple(extra)

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return NUM_SPECIAL + 256 + len(self._extra)

    @property
    def digest(self) -> str:
        """`sha256:…` over kind and special ids."""
        return digest_bytes(self.to_bytes())

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """The ids of all texts in one array, without bos and eos."""
        data = [text.encode() for text in texts]
        ids_T = np.frombuffer(b"".join(data), np.uint8).astype(np.int32) + NUM_SPECIAL
        return Encoded(ids_T, np.cumsum(np.fromiter(map(len, data), np.int64, len(data))))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, U+FFFD where bytes do not make a character; special ids stand for no text."""
        return bytes(i - NUM_SPECIAL for i in ids if NUM_SPECIAL <= i < NUM_SPECIAL + 256).decode("utf-8", "replace")

    def files(self) -> dict[str, bytes]:
        """Canonical JSON with the kind."""
        content: dict[str, Any] = {"kind": self.kind, "special": SPECIAL_IDS}
        return {self.file_name: canonical_json(content | _if_any(self._extra))}

    def token_id(self, name: str) -> int | None:
        """The id of a special token; none where there is no such token."""
        return NUM_SPECIAL + 256 + self._extra.index(name) if name in self._extra else None


def _if_any(extra: tuple[str, ...]) -> dict[str, Any]:
    return {"extra": list(extra)} if extra else {}
