"""Builds the tokenizer from a sample of the training text, byte for byte the same for the same sample, or from the user's files."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from common.errors import ConfigError
from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer.base import SPECIAL_IDS, ByteTokenizer, CharacterTokenizer, Tokenizer
from data_pipeline.tokenizer.loading import open_supplied
from data_pipeline.tokenizer.model_file import without_provenance
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK, SentencePieceTokenizer

VOCAB_SIZES = ((2e6, 1024), (5e7, 4096), (5e8, 8192), (5e9, 16_384), (5e10, 32_768), (math.inf, 65_536))
"""Most bytes of text, and size of the vocabulary: with so much text each token is seen often enough to be learned."""
_PIECE_CHARS = 4096
_FITTINGS = 2  # a size can be too small for the characters of a text, and then too large for its rest
_UNKNOWN_MARK = "\u2585"  # SentencePiece uses this character itself, and drops every training sentence that has it


def sample_pieces(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield about `fraction` of the texts, in pieces of up to 4096 characters. The digest of a piece decides if it is chosen."""
    threshold = round(min(fraction, 1.0) * 2**64)
    for text in texts:
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            if int.from_bytes(hashlib.blake2b(piece.encode(), digest_size=8).digest(), "big") < threshold:
                yield piece


def alphabet_of(texts: Iterable[str]) -> str:
    return "".join(sorted(set().union(*texts)))


def fitting_vocab_size(num_bytes: int) -> int:
    return next(size for most, size in VOCAB_SIZES if num_bytes <= most)


def train_tokenizer(
    sample: Sequence[str], settings: TokenizerConfig, extra_special: Sequence[str] = (), num_bytes: int = 0
) -> Tokenizer:
    """Return the one at `settings.path`, or build one. The size `auto` follows from `num_bytes` of the whole training text."""
    if settings.path is not None:
        return _supplied(settings.path, settings, extra_special)
    extra = tuple(dict.fromkeys((*settings.extra_special, *extra_special)))
    if settings.kind == "byte":
        return ByteTokenizer(extra)
    if settings.kind == "char":
        return CharacterTokenizer(alphabet_of(sample), extra)
    size = fitting_vocab_size(num_bytes) if settings.vocab_size == "auto" else settings.vocab_size
    for fittings_left in reversed(range(_FITTINGS + 1)):
        try:
            return SentencePieceTokenizer(_train_sentencepiece(sample, settings, size, extra), settings.kind)
        except VocabSizeError as error:
            if settings.vocab_size != "auto" or not fittings_left:
                raise
            size = error.possible
    raise AssertionError("the last attempt returns or raises")


class VocabSizeError(ConfigError):
    """The training text is too small or has too many characters for the size of the vocabulary that was asked for."""

    def __init__(self, message: str, possible: int) -> None:
        super().__init__(message)
        self.possible = possible  # the nearest size that the text allows


def _supplied(path: Path, settings: TokenizerConfig, needed: Sequence[str]) -> Tokenizer:
    tokenizer = open_supplied(path, settings.chosen_names)
    for role, id_ in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id)):
        if getattr(settings, f"add_{role}") and id_ is None:
            raise ConfigError(
                f"tokenizer.path: {path} does not say which token is {role}; name it in tokenizer.{role}_token, "
                f"or set tokenizer.add_{role} to false"
            )
    if missing := [name for name in needed if tokenizer.token_id(name) is None]:
        raise ConfigError(
            f"tokenizer.path: {path} has no token {missing[0]}, which augment.fim_rate needs; "
            "add it to the file, or set augment.fim_rate to 0"
        )
    return tokenizer


def _train_sentencepiece(
    sample: Sequence[str], settings: TokenizerConfig, vocab_size: int, control_symbols: Sequence[str]
) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for piece in sample for part in piece.split(_UNKNOWN_MARK) if part),
            model_writer=model,
            model_type=settings.kind,
            vocab_size=vocab_size,
            hard_vocab_limit=True,
            num_threads=settings.train_threads,
            **{f"{role}_id": number for role, number in SPECIAL_IDS.items()},  # type: ignore[arg-type]
            control_symbols=list(control_symbols),
            # These make decoding exact for every text: no normalisation, and rare characters as bytes.
            byte_fallback=True,
            character_coverage=settings.character_coverage,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * _PIECE_CHARS,
            input_sentence_size=0,
            shuffle_input_sentence=False,
            minloglevel=2,
            # A model of text without a space would decode a space as the mark that stands for it.
            **({} if any(" " in piece for piece in sample) else {"required_chars": SPACE_MARK}),  # type: ignore[arg-type]
        )
    except RuntimeError as error:
        raise _explain(str(error), settings, vocab_size) from None
    return without_provenance(model.getvalue())


def _explain(message: str, settings: TokenizerConfig, vocab_size: int) -> ConfigError:
    asked = f"tokenizer.vocab_size = {vocab_size}"
    if match := re.search(r"Vocabulary size too high .{0,200}? value <= (\d+)", message):
        text = f"{asked}: the training text allows {match[1]} at most; set auto, or at most {match[1]}, or add text"
        return VocabSizeError(text, int(match[1]))
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return VocabSizeError(
            f"{asked}: the training text needs {match[1]} for its characters alone; set auto, or more than that, "
            "or lower tokenizer.character_coverage",
            int(match[1]) + vocab_size,  # with many characters, as many tokens more as were asked for
        )
    if "sentences_.empty" in message:
        return ConfigError(f"{asked}: there is no training text to train a tokenizer on; add text, or set tokenizer.kind to byte")
    return ConfigError(f"{asked}, tokenizer.kind = {settings.kind}: SentencePiece cannot train on this text: {message.strip()}")
