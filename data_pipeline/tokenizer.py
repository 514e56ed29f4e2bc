"""Text to token ids and back: SentencePiece models (bpe, unigram), characters, and bytes.

Ids 0 to 3 are pad, unk, bos and eos in every kind. `encode` adds neither bos nor eos. Every kind but `char` gives back exactly
the text it was given, whatever it holds; `char` knows the characters of the training text and writes unk for any other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from data_pipeline.errors import PreparedDataError
from data_pipeline.files import canonical_json, digest_bytes

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNK_ID",
    "ByteTokenizer",
    "CharacterTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
]

PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)
_SPECIAL_IDS = {"pad": PAD_ID, "unk": UNK_ID, "bos": BOS_ID, "eos": EOS_ID}
_NUM_SPECIAL = len(_SPECIAL_IDS)

_SPACE_MARK = "\u2581"  # SentencePiece writes a space as this character, and so would decode the character itself as a space
_PROCESSOR_CHARS = 1 << 20  # longest text given to SentencePiece in one piece; it needs some 100 bytes of memory a character


class Tokenizer(ABC):
    """A fixed, reversible mapping between text and ids in [0, vocab_size)."""

    kind: str
    file_name: str
    """The one file in the tokenizer's folder, by which `load_tokenizer` knows the kind."""

    pad_id: int = PAD_ID
    unk_id: int = UNK_ID
    bos_id: int = BOS_ID
    eos_id: int = EOS_ID

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, the four special ones included."""

    @property
    @abstractmethod
    def digest(self) -> str:
        """`sha256:…` over kind, pieces, scores and special ids: over what decides the ids, not over a file."""

    @abstractmethod
    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without bos and eos."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special ids stand for no text."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The content of the tokenizer's file."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of every text, without bos and eos."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode(self, text: str) -> list[int]:
        """The ids of one text, without bos and eos."""
        return self.encode_batch([text])[0]


class SentencePieceTokenizer(Tokenizer):
    """A trained SentencePiece model with byte fallback, of kind bpe or unigram."""

    def __init__(self, model: bytes, kind: str) -> None:
        self.kind = kind
        self.file_name = f"{kind}.model"
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self._space_mark_ids = np.array([self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()], np.int32)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the four special ones included."""
        return int(self._processor.get_piece_size())

    @property
    def digest(self) -> str:
        """`sha256:…` over kind, pieces, scores and special ids; how it was trained, which the file says too, changes no id."""
        processor = self._processor
        pieces = [[processor.id_to_piece(i), float(processor.get_score(i)).hex()] for i in range(self.vocab_size)]
        return digest_bytes(canonical_json({"kind": self.kind, "pieces": pieces, "special": _SPECIAL_IDS}))

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without bos and eos."""
        arrays: list[NDArray[np.int32] | None] = [None] * len(texts)
        plain = []
        for index, text in enumerate(texts):
            if _SPACE_MARK in text or len(text) > _PROCESSOR_CHARS:
                arrays[index] = self._encode_with_care(text)
            else:
                plain.append(index)
        encoded = self._processor.encode([texts[index] for index in plain], return_type="numpy", num_threads=1)
        for index, ids in zip(plain, encoded, strict=True):
            arrays[index] = ids
        return [ids for ids in arrays if ids is not None]

    def _encode_with_care(self, text: str) -> NDArray[np.int32]:
        """Spells the space mark in bytes, and hands long text over in parts cut where no piece can reach across."""
        parts: list[NDArray[np.int32]] = []
        for number, run in enumerate(text.split(_SPACE_MARK)):
            if number:
                parts.append(self._space_mark_ids)
            parts += self._processor.encode(_cut_at_spaces(run, _PROCESSOR_CHARS), return_type="numpy", num_threads=1)
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special ids stand for no text."""
        return str(self._processor.decode([int(i) for i in ids if i >= _NUM_SPECIAL]))

    def to_bytes(self) -> bytes:
        """The serialised model."""
        return self._model


def _cut_at_spaces(text: str, max_chars: int) -> list[str]:
    """`text` in parts of at most `max_chars`, each cut before a space that follows another character.

    No piece has a space after its first non-space character, so the parts encode to the ids of the whole. Only where `max_chars`
    go by without a space is the cut made anywhere.
    """
    parts = []
    start = 0
    while len(text) - start > max_chars:
        end = text.rfind(" ", start + 1, start + max_chars)
        while end > start and text[end - 1] == " ":
            end = text.rfind(" ", start + 1, end)
        end = end if end > start else start + max_chars
        parts.append(text[start:end])
        start = end
    return [*parts, text[start:]]


class CharacterTokenizer(Tokenizer):
    """One id for each character of an alphabet, in the order of the alphabet."""

    kind = "char"
    file_name = "characters.json"

    def __init__(self, alphabet: str) -> None:
        self._alphabet = alphabet
        # A table over all code points up to the highest known one; what lies beyond it is unknown too.
        codes = np.frombuffer(alphabet.encode("utf-32-le"), np.uint32)
        self._id_of_code = np.full(int(codes.max(initial=0)) + 2, UNK_ID, np.int32)
        self._id_of_code[codes] = np.arange(_NUM_SPECIAL, _NUM_SPECIAL + len(codes), dtype=np.int32)

    @property
    def vocab_size(self) -> int:
        """Number of ids, the four special ones included."""
        return _NUM_SPECIAL + len(self._alphabet)

    @property
    def digest(self) -> str:
        """`sha256:…` over kind, alphabet and special ids."""
        return digest_bytes(self.to_bytes())

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without bos and eos; unk for characters outside the alphabet."""
        last = len(self._id_of_code) - 1
        return [self._id_of_code[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), last)] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, U+FFFD for unk; other special ids stand for no text."""
        return "".join(
            "\ufffd" if i == UNK_ID else self._alphabet[i - _NUM_SPECIAL] for i in ids if i == UNK_ID or i >= _NUM_SPECIAL
        )

    def to_bytes(self) -> bytes:
        """Canonical JSON with the alphabet."""
        return canonical_json({"kind": self.kind, "pieces": self._alphabet, "special": _SPECIAL_IDS})


class ByteTokenizer(Tokenizer):
    """One id for each of the 256 bytes of UTF-8."""

    kind = "byte"
    file_name = "bytes.json"

    @property
    def vocab_size(self) -> int:
        """Number of ids, the four special ones included."""
        return _NUM_SPECIAL + 256

    @property
    def digest(self) -> str:
        """`sha256:…` over kind and special ids."""
        return digest_bytes(self.to_bytes())

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of every text, without bos and eos."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) + _NUM_SPECIAL for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, U+FFFD where bytes do not make a character; special ids stand for no text."""
        return bytes(i - _NUM_SPECIAL for i in ids if i >= _NUM_SPECIAL).decode("utf-8", "replace")

    def to_bytes(self) -> bytes:
        """Canonical JSON with the kind."""
        return canonical_json({"kind": self.kind, "special": _SPECIAL_IDS})


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer in a folder, which is `tokenizer` in prepared data.

    Raises:
        PreparedDataError: there is none, or its file cannot be read.
    """
    for file_name, build in _BUILDERS.items():
        path = directory / file_name
        if path.is_file():
            try:
                return build(path.read_bytes())
            except (ValueError, KeyError, TypeError, RuntimeError) as error:
                raise PreparedDataError(f"{path}: not a tokenizer that can be read ({error}); run `prepare` again") from None
    raise PreparedDataError(f"{directory}: no tokenizer in it; run `prepare`, or name a folder that it has written")


_BUILDERS: dict[str, Callable[[bytes], Tokenizer]] = {
    "bpe.model": lambda model: SentencePieceTokenizer(model, "bpe"),
    "unigram.model": lambda model: SentencePieceTokenizer(model, "unigram"),
    CharacterTokenizer.file_name: lambda data: CharacterTokenizer(json.loads(data)["pieces"]),
    ByteTokenizer.file_name: lambda _: ByteTokenizer(),
}
