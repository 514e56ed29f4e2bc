"""Reads SentencePiece models from the wire format (protobuf.dev), as its reader needs the protobuf that it was made with."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from common.files import digest_bytes

PieceKind = Literal["text", "unknown", "control", "symbol", "unused", "byte"]  # symbol: user-defined, found before all others

UNIGRAM, BPE = 1, 2  # values of `ModelSpec.model_type`; an absent field means 1

_PIECE, _TRAINER_SPEC, _NORMALIZER_SPEC = 1, 2, 3
_INPUT, _MODEL_PREFIX, _MODEL_TYPE, _NUM_THREADS, _WHITESPACE_AS_SUFFIX, _BYTE_FALLBACK = 1, 2, 3, 16, 24, 35
_PIECE_TYPE, _CONTROL = 3, 3
_KINDS: tuple[PieceKind, ...] = ("text", "unknown", "control", "symbol", "unused", "byte")  # in the order of their numbers, from 1
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5


@dataclass(frozen=True)
class ModelSpec:
    pieces: str  # digest of the vocabulary: pieces, scores and types
    model_type: int
    byte_fallback: bool
    whitespace_as_suffix: bool
    charsmap: bytes  # the rules by which characters are replaced
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool

    @property
    def keeps_text(self) -> bool:
        """A space may be added before the first character."""
        changes = self.charsmap or self.remove_extra_whitespaces or self.whitespace_as_suffix
        return self.escape_whitespaces and not changes

    @property
    def content(self) -> dict[str, Any]:
        return vars(self) | {"charsmap": digest_bytes(self.charsmap)}


class _Field(NamedTuple):
    number: int
    start: int  # of its first byte, which belongs to the key
    end: int
    value: int | bytes


def read_spec(model: bytes) -> ModelSpec:
    """Return the properties of a model file; ValueError if it is not one, as from all functions of this module."""
    pieces, sections = [], {}
    for field in _fields(model):
        if field.number == _PIECE:
            pieces.append(model[field.start : field.end])
        else:
            sections[field.number] = field.value
    if not pieces:
        raise ValueError("it holds no vocabulary")
    trainer, normalizer = _values(sections.get(_TRAINER_SPEC, b"")), _values(sections.get(_NORMALIZER_SPEC, b""))
    charsmap = normalizer.get(_CHARSMAP, b"")
    return ModelSpec(
        pieces=digest_bytes(b"".join(pieces)),
        model_type=int(trainer.get(_MODEL_TYPE, UNIGRAM)),
        byte_fallback=bool(trainer.get(_BYTE_FALLBACK, False)),
        whitespace_as_suffix=bool(trainer.get(_WHITESPACE_AS_SUFFIX, False)),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        add_dummy_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, True)),
        remove_extra_whitespaces=bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, True)),
        escape_whitespaces=bool(normalizer.get(_ESCAPE_WHITESPACES, True)),
    )


def piece_kinds(model: bytes) -> list[PieceKind]:
    numbers = [_values(field.value).get(_PIECE_TYPE, 1) for field in _fields(model) if field.number == _PIECE]
    known = dict(enumerate(_KINDS, start=1))
    if strange := [number for number in numbers if number not in known]:
        raise ValueError(f"a piece has the kind {strange[0]!r}")
    return [known[int(number)] for number in numbers]


def without_provenance(model: bytes) -> bytes:
    """Return the model file without the thread count and the paths of its training, which change no id."""
    return _changed(model, _TRAINER_SPEC, {_INPUT, _MODEL_PREFIX, _NUM_THREADS})


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the model file, changed so that the model adds no space before the first character."""
    return _changed(model, _NORMALIZER_SPEC, {_ADD_DUMMY_PREFIX}, bytes([_ADD_DUMMY_PREFIX << 3, False]))


def with_control_pieces(model: bytes, ids: Set[int]) -> bytes:
    """Return the model file, changed so that these pieces are control symbols, which no text is encoded as."""
    parts = []
    number = 0
    for field in _fields(model):
        parts.append(model[field.start : field.end])
        if field.number == _PIECE and isinstance(field.value, bytes):
            if number in ids:  # of a field that occurs twice, the last one counts
                content = field.value + bytes([_PIECE_TYPE << 3, _CONTROL])
                parts[-1] = bytes([_PIECE << 3 | 2]) + _varint(len(content)) + content
            number += 1
    return b"".join(parts)


def _changed(model: bytes, section: int, drop: Set[int], add: bytes = b"") -> bytes:
    parts = []
    for field in _fields(model):
        if field.number == section and isinstance(field.value, bytes):
            inner = [field.value[part.start : part.end] for part in _fields(field.value) if part.number not in drop]
            content = b"".join(inner) + add
            parts += [bytes([section << 3 | 2]), _varint(len(content)), content]
        else:
            parts.append(model[field.start : field.end])
    return b"".join(parts)


def _values(section: int | bytes) -> dict[int, int | bytes]:
    if isinstance(section, int):
        raise ValueError("a section of the model is a number")
    return {field.number: field.value for field in _fields(section)}


def _fields(data: bytes) -> Iterator[_Field]:
    """Yield the fields of a message in the order of the file. Fixed-width numbers are returned as bytes."""
    position = 0
    while position < len(data):
        start = position
        key, position = _read_varint(data, position)
        wire_type = key & 7
        value: int | bytes
        if wire_type == 0:
            value, position = _read_varint(data, position)
        else:
            if wire_type == 2:
                length, position = _read_varint(data, position)
            else:
                length = {1: 8, 5: 4}.get(wire_type, -1)
            if length < 0 or position + length > len(data):
                raise ValueError(f"not a protocol buffer: no field begins at byte {start}")
            value = data[position : position + length]
            position += length
        yield _Field(key >> 3, start, position, value)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, position + index + 1
    raise ValueError(f"not a protocol buffer: no number begins at byte {position}")


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
