"""Properties of SentencePiece models and changed copies of them, by SentencePiece's own message."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from common.files import digest_bytes
from data_pipeline.tokenizer.special import Beside

PieceKind = Literal["text", "unknown", "control", "symbol", "unused", "byte"]  # symbol: user-defined, found before all others

UNIGRAM, BPE = 1, 2  # values of `ModelSpec.model_type`

_KINDS: tuple[PieceKind, ...] = ("text", "unknown", "control", "symbol", "unused", "byte")  # in the order of their numbers, from 1
_CONTROL = 3
_MESSAGE: Any = vars(sentencepiece_model_pb2)["ModelProto"]  # made when the module is imported, so it has no type


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


def read_spec(model: bytes) -> ModelSpec:
    """Return the properties of a model file; ValueError if it is not one, as from all functions of this module."""
    message = _parse(model)
    if not message.pieces:
        raise ValueError("it holds no vocabulary")
    trainer, normalizer = message.trainer_spec, message.normalizer_spec
    return ModelSpec(
        pieces=digest_bytes(_MESSAGE(pieces=message.pieces).SerializeToString()),
        model_type=trainer.model_type,
        byte_fallback=trainer.byte_fallback,
        whitespace_as_suffix=trainer.treat_whitespace_as_suffix,
        charsmap=normalizer.precompiled_charsmap,
        add_dummy_prefix=normalizer.add_dummy_prefix,
        remove_extra_whitespaces=normalizer.remove_extra_whitespaces,
        escape_whitespaces=normalizer.escape_whitespaces,
    )


def piece_kinds(model: bytes) -> list[PieceKind]:
    return [_KINDS[piece.type - 1] for piece in _parse(model).pieces]


def without_provenance(model: bytes) -> bytes:
    """Return the model file without the thread count and the paths of its training, which change no id."""
    message = _parse(model)
    for field in ("input", "model_prefix", "num_threads"):
        message.trainer_spec.ClearField(field)
    return bytes(message.SerializeToString())


def without_dummy_prefix(model: bytes) -> bytes:
    """Return the model file, changed so that the model adds no space before the first character."""
    message = _parse(model)
    message.normalizer_spec.add_dummy_prefix = False
    return bytes(message.SerializeToString())


def with_control_pieces(model: bytes, ids: Set[int]) -> bytes:
    """Return the model file, changed so that these pieces are control symbols, which no text is encoded as."""
    message = _parse(model)
    for number in ids:
        message.pieces[number].type = _CONTROL
    return bytes(message.SerializeToString())


def with_added_pieces(model: bytes, beside: Beside) -> bytes:
    """Return the model file with the special tokens that only the files beside it name, as control symbols."""
    message = _parse(model)
    missing = beside.missing({piece.piece: number for number, piece in enumerate(message.pieces)}, len(message.pieces))
    for name in missing:
        flags = beside.flags_of(name)
        if not flags.get("special") or any(flags.get(flag) for flag in ("lstrip", "rstrip", "single_word")):
            raise ValueError(
                f"a file beside it names the token {name[:60]!r}, which a .model cannot hold, because it is not special or takes "
                "white space; give a tokenizer.json, which save_pretrained of transformers writes"
            )
        message.pieces.add(piece=name, type=_CONTROL)
    return bytes(message.SerializeToString()) if missing else model


def _parse(model: bytes) -> Any:
    try:
        return _MESSAGE.FromString(model)
    except DecodeError:
        raise ValueError("it is not a model of SentencePiece, or it is damaged") from None
