from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.base import Encoded, NamedToken
from data_pipeline.tokenizer.model_file import (
    BPE,
    ModelSpec,
    PieceKind,
    piece_kinds,
    read_spec,
    with_control_pieces,
    without_dummy_prefix,
)
from data_pipeline.tokenizer.probe import gives_same_ids
from data_pipeline.tokenizer.special import CONFIG_FILE, ROLES, LibraryTokenizer, special_tokens
from data_pipeline.tokenizer.subword_sampling import sample_bpe, sample_unigram
from data_pipeline.tokenizer.word_cache import WordCache, join_texts, places_to_cut

SPACE_MARK = "\u2581"  # SentencePiece writes a space so, and would decode the character as one

_SPACE_MARK_BYTES = SPACE_MARK.encode()
_PROCESSOR_CHARS = 1 << 20  # longest text for one call of SentencePiece, which needs about 100 bytes of memory per character
_SUPPLIED = "sentencepiece"


class Piece(NamedTuple):
    name: str
    score: float
    kind: PieceKind


class SentencePieceTokenizer(LibraryTokenizer):
    """A SentencePiece model. Its kind is `bpe` or `unigram` if it is our own, which loses no text, else `sentencepiece`."""

    def __init__(
        self, model: bytes, kind: str, chosen: Mapping[str, str] | None = None, found: Mapping[str, str | None] | None = None
    ) -> None:
        """ValueError: the model cannot be used. `chosen` and `found` name special tokens by role and override its own."""
        self.kind = kind
        self.file_name = f"{kind}.model"
        self._model = model
        self._spec = read_spec(model)
        self._processor = _read(model)
        self._pieces: list[str] = self._processor.id_to_piece(list(range(self.vocab_size)))
        ids = {role: getattr(self._processor, f"{role}_id")() for role in ROLES}
        own = {role: self._pieces[i] if i >= 0 else None for role, i in ids.items()}
        self.set_special_tokens(special_tokens(chosen or {}, found or {}, self.token_id, own))
        ends = {i for i in (self.bos_id, self.eos_id) if i is not None}
        if text := {i for i in ends if not (self._processor.is_control(i) or self._processor.is_unknown(i))}:
            model = with_control_pieces(model, text)
            self._processor = _read(model)
        self._is_silent = np.array(self._processor.is_control(list(range(self.vocab_size))))
        self._is_silent[[i for i in self.special.ids.values() if i is not None]] = True
        # If the model adds a space before the first character, we add it instead, so that a text can be encoded in parts.
        self._prefix = " " if self._spec.keeps_text and self._spec.add_dummy_prefix else ""
        self._parts_processor = self._processor
        if self._prefix:
            self._parts_processor = sentencepiece.SentencePieceProcessor(model_proto=without_dummy_prefix(model))
        self._words = self._word_cache()
        if kind == _SUPPLIED and self._words and not gives_same_ids(self.encode_arrays, self.library_ids):
            self._words = None

    def library_ids(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [np.array(ids, np.int32) for ids in self._processor.encode(list(texts), num_threads=1)]

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def pieces(self) -> list[Piece]:
        """The vocabulary, in the order of the ids. Bos and eos are control symbols, whatever the file says."""
        ids = list(range(self.vocab_size))
        columns = zip(
            *(self._pieces, self._processor.get_score(ids), piece_kinds(self._model), self._processor.is_control(ids)), strict=True
        )
        return [Piece(name, score, "control" if is_control else kind) for name, score, kind, is_control in columns]

    @property
    def vocab_size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def digest(self) -> str:
        return digest_bytes(canonical_json({"kind": self.kind, "special": dict(self.special.ids)} | self._spec.content))

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        texts = [self._prefix + text if text else text for text in texts]
        if self._words is None:
            return Encoded.of(self._encode_texts(texts))
        joined, ends_D = join_texts(texts)
        cuts = ends_D
        if self.spells_marks and (marks := [found.start() for found in re.finditer(_SPACE_MARK_BYTES, joined)]):
            cuts = np.unique(np.concatenate([ends_D, marks, np.add(marks, len(_SPACE_MARK_BYTES))]))
        return Encoded(*self._words.encode(joined, cuts, ends_D))

    def sample(self, text: str, alpha: float, seed: int) -> NDArray[np.int32]:
        """Equal for equal seeds. `alpha`: power of probability (unigram, Kudo 2018); share left out (bpe, Provilkov 2020)."""
        draw = random.Random(seed).random  # its results are the same in all versions of Python
        segment = sample_bpe if self._spec.model_type == BPE else sample_unigram
        ids: list[int] = []
        for number, run in enumerate(text.split(SPACE_MARK) if self.spells_marks else [text]):
            ids += self._space_mark_ids.tolist() if number else []
            normalized = self._processor.normalize(run)
            ids += (i for piece in segment(normalized, self._scores, alpha, draw) for i in self._ids_of(piece))
        return np.array(ids, np.int32)

    @cached_property
    def _scores(self) -> dict[str, float]:
        processor, ids = self._processor, list(range(self.vocab_size))
        skip = np.array(processor.is_control(ids)) | processor.is_byte(ids) | processor.is_unknown(ids) | processor.is_unused(ids)
        scores = zip(self._pieces, processor.get_score(ids), skip, strict=True)
        return {piece: score for piece, score, is_skipped in scores if not is_skipped}

    def _ids_of(self, piece: str) -> list[int]:
        """Return the id of a piece. A piece without an id gets the ids of its bytes, or unk."""
        if piece in self._scores:
            return [int(self._processor.piece_to_id(piece))]
        return self._byte_ids(piece.encode()) if self._spec.byte_fallback else [int(self._processor.unk_id())]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if not self._is_silent[i]]))

    def files(self) -> dict[str, bytes]:
        return {self.file_name: self._model} | ({CONFIG_FILE: self.special.to_bytes()} if self.kind == _SUPPLIED else {})

    def token_id(self, name: str) -> int | None:
        number = self._processor.piece_to_id(name)
        return int(number) if self._pieces[number] == name else None

    @property
    def named_tokens(self) -> tuple[NamedToken, ...]:
        silent = np.flatnonzero(self._is_silent).tolist()
        return tuple(NamedToken(self._pieces[number], number) for number in silent)

    @property
    def spells_marks(self) -> bool:
        """Whether U+2581 in a text is encoded as bytes. A supplied model encodes it as a space."""
        return self.kind != _SUPPLIED

    def _word_cache(self) -> WordCache | None:
        """Return a cache for a byte-pair model with byte fallback that does not change text; None for other models."""
        if not (self._spec.model_type == BPE and self._spec.byte_fallback and self._spec.keeps_text):
            return None
        processor, ids = self._processor, list(range(self.vocab_size))
        skip = np.array(processor.is_control(ids)) | processor.is_byte(ids) | processor.is_unknown(ids)
        pieces = [piece for piece, is_skipped in zip(self._pieces, skip, strict=True) if not is_skipped]
        may_cut = places_to_cut(pieces, SPACE_MARK, (" ",) if self.spells_marks else (" ", SPACE_MARK))
        return WordCache(may_cut, lambda words: self._encode_texts([word.decode() for word in words]))

    def _encode_texts(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the ids of texts that begin with the model's prefix."""
        is_plain = [len(text) <= _PROCESSOR_CHARS and not (SPACE_MARK in text and self.spells_marks) for text in texts]
        plain = iter(self._parts_processor.encode(list(compress(texts, is_plain)), return_type="numpy", num_threads=1))
        return [next(plain) if one else self._encode_with_care(text) for text, one in zip(texts, is_plain, strict=True)]

    def _encode_with_care(self, text: str) -> NDArray[np.int32]:
        """Encode space marks as bytes, and a long text in parts that no piece can span."""
        parts: list[NDArray[np.int32]] = []
        for number, run in enumerate(text.split(SPACE_MARK) if self.spells_marks else [text]):
            if number:
                parts.append(self._space_mark_ids)
            cut = _cut_at_spaces(run, _PROCESSOR_CHARS) if self._spec.keeps_text else [run]
            parts += self._parts_processor.encode(cut, return_type="numpy", num_threads=1)
        return np.concatenate(parts)

    @property
    def _space_mark_ids(self) -> NDArray[np.int32]:
        return np.array(self._byte_ids(_SPACE_MARK_BYTES), np.int32)

    def _byte_ids(self, data: bytes) -> list[int]:
        return [int(self._processor.piece_to_id(f"<0x{byte:02X}>")) for byte in data]


def _read(model: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"SentencePiece cannot read it: {str(error).strip()}") from None


def _cut_at_spaces(text: str, max_chars: int) -> list[str]:
    """Cut before spaces that follow another character, which no piece spans; else after `max_chars`."""
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
