from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from common.files import canonical_json, digest_bytes
from data_pipeline.tokenizer.base import CONFIG_FILE, ROLES, Encoded, NamedToken
from data_pipeline.tokenizer.model_file import (
    BPE,
    ModelSpec,
    PieceKind,
    piece_kinds,
    read_spec,
    with_control_pieces,
    without_dummy_prefix,
)
from data_pipeline.tokenizer.special import LibraryTokenizer
from data_pipeline.tokenizer.word_cache import WordCache, join_texts, places_to_cut

SPACE_MARK = "\u2581"  # SentencePiece writes a space so, and would decode the character as one

_SPACE_MARK_BYTES = SPACE_MARK.encode()
_PROCESSOR_CHARS = 1 << 20  # longest text for one call of SentencePiece, which needs about 100 bytes of memory per character
_SUPPLIED = "sentencepiece"
_UNKNOWN_PENALTY = 10.0  # a character without a piece scores this much less than the worst piece, as in SentencePiece
_WORD = re.compile("\u2581*[^\u2581]*")

Draw = Callable[[], float]


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
        self.set_special_tokens(chosen or {}, found or {}, own)
        ends = {i for i in (self.bos_id, self.eos_id) if i is not None}
        if text := {i for i in ends if not (self._processor.is_control(i) or self._processor.is_unknown(i))}:
            model = with_control_pieces(model, text)
            self._processor = _read(model)
        self._is_silent = np.array(self._processor.is_control(list(range(self.vocab_size))))
        self._is_silent[[i for i in self.special_ids.values() if i is not None]] = True
        # If the model adds a space before the first character, we add it instead, so that a text can be encoded in parts.
        self._prefix = " " if self._spec.keeps_text and self._spec.add_dummy_prefix else ""
        self._parts_processor = self._processor
        if self._prefix:
            self._parts_processor = sentencepiece.SentencePieceProcessor(model_proto=without_dummy_prefix(model))
        self._words = None
        if self._spec.model_type == BPE and self._spec.byte_fallback and self._spec.keeps_text:
            names = [piece.name for piece in self.pieces if piece.kind not in ("control", "byte", "unknown")]
            may_cut = places_to_cut(names, SPACE_MARK, (" ",) if self.spells_marks else (" ", SPACE_MARK))
            self._words = WordCache(may_cut, lambda words: self._encode_texts([word.decode() for word in words]))
        if kind == _SUPPLIED and self._words and not self.gives_library_ids(self.encode_arrays):
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
        return digest_bytes(canonical_json({"kind": self.kind, "special": self.special_ids} | self._spec.content))

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
            ids += self._byte_ids(_SPACE_MARK_BYTES) if number else []
            for piece in segment(self._processor.normalize(run), self._scores, alpha, draw):
                if piece in self._scores:
                    ids.append(int(self._processor.piece_to_id(piece)))
                else:
                    ids += self._byte_ids(piece.encode()) if self._spec.byte_fallback else [int(self._processor.unk_id())]
        return np.array(ids, np.int32)

    @cached_property
    def _scores(self) -> dict[str, float]:
        return {piece.name: piece.score for piece in self.pieces if piece.kind in ("text", "symbol")}

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids if not self._is_silent[i]]))

    def files(self) -> dict[str, bytes]:
        config = self.config if self.kind == _SUPPLIED else canonical_json(self.usage)
        return {self.file_name: self._model} | ({CONFIG_FILE: config} if self.kind == _SUPPLIED or self.usage else {})

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
                parts.append(np.array(self._byte_ids(_SPACE_MARK_BYTES), np.int32))
            cut = _cut_at_spaces(run, _PROCESSOR_CHARS) if self._spec.keeps_text else [run]
            parts += self._parts_processor.encode(cut, return_type="numpy", num_threads=1)
        return np.concatenate(parts)

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


# Subword sampling is our own, because SentencePiece's generator is seeded differently in each version (since 0.2.1).


def words_of(text: str) -> Iterator[str]:
    """Yield the words of the text, each with the space marks before it. No piece of our models spans two words."""
    return (match[0] for match in _WORD.finditer(text) if match[0])


def sample_bpe(text: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> list[str]:
    """Leave merges out with probability `alpha` (Provilkov et al. 2020), retried once a neighbour has changed. 0 ≤ `draw()` < 1."""
    return [piece for word in words_of(text) for piece in _join(word, scores, alpha, draw)]


def _join(word: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> Iterator[str]:
    symbols = list(word)  # a symbol that was merged into the previous one is empty
    following = list(range(1, len(word) + 1))
    before = list(range(-1, len(word) - 1))
    joins: list[tuple[float, int, str]] = []

    def offer(left: int) -> None:
        right = following[left] if left >= 0 else len(word)
        if right < len(word) and (score := scores.get(piece := symbols[left] + symbols[right])) is not None:
            heapq.heappush(joins, (-score, left, piece))

    for left in range(len(word) - 1):
        offer(left)
    while joins:
        _, left, piece = heapq.heappop(joins)
        right = following[left]
        is_stale = right == len(word) or not symbols[left] or symbols[left] + symbols[right] != piece
        if is_stale or draw() < alpha:
            continue
        symbols[left], symbols[right] = piece, ""
        following[left] = following[right]
        if following[left] < len(word):
            before[following[left]] = left
        offer(before[left])
        offer(left)
    return (symbol for symbol in symbols if symbol)


def sample_unigram(text: str, scores: Mapping[str, float], alpha: float, draw: Draw) -> list[str]:
    """Draw by probability to the power of `alpha` (Kudo 2018). `scores` are logarithms; `draw` returns numbers in [0, 1)."""
    longest = max(map(len, scores))
    unknown = min(scores.values()) - _UNKNOWN_PENALTY
    return [piece for word in words_of(text) for piece in _segment(word, scores, alpha, draw, longest, unknown)]


def _segment(word: str, scores: Mapping[str, float], alpha: float, draw: Draw, longest: int, unknown: float) -> list[str]:
    """Sum forwards over all segmentations up to each place of a word, then draw backwards from its end."""
    reached = [0.0]  # logarithm of the summed weights of all segmentations up to a place
    arrivals: list[list[tuple[float, int]]] = [[]]  # the same by the start of their last piece
    for end in range(1, len(word) + 1):
        arriving = [
            (reached[start] + alpha * score, start)
            for start in range(max(0, end - longest), end)
            if (score := scores.get(word[start:end], unknown if start == end - 1 else None)) is not None
        ]
        largest = max(arriving)[0]
        reached.append(largest + math.log(sum(math.exp(weight - largest) for weight, _ in arriving)))
        arrivals.append(arriving)
    pieces = []
    end = len(word)
    while end:
        left = draw()
        start = arrivals[end][-1][1]
        for weight, start in arrivals[end]:  # noqa: B007 - the last one is used if rounding leaves a rest
            left -= math.exp(weight - reached[end])
            if left < 0:
                break
        pieces.append(word[start:end])
        end = start
    return pieces[::-1]
