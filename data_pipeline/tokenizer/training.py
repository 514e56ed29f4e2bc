"""Builds the tokenizer of the settings: from a sample of the training text, or from the user's files.

The same sample gives the same tokenizer, byte for byte.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from common.errors import ConfigError
from data_pipeline.config import TokenizerSettings
from data_pipeline.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    ByteTokenizer,
    CharacterTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from data_pipeline.tokenizer.loading import open_supplied
from data_pipeline.tokenizer.model_file import without_provenance

__all__ = ["alphabet_of", "sample_pieces", "train_tokenizer"]

_PIECE_CHARS = 4096
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
    """Return every character of the texts, sorted by code point."""
    return "".join(sorted(set().union(*texts)))


def train_tokenizer(sample: Sequence[str], settings: TokenizerSettings, extra_special: Sequence[str] = ()) -> Tokenizer:
    """Return the tokenizer at `settings.path`; without a path, build one of `settings.kind`.

    bpe and unigram are trained on the sample, char has the characters of the sample, byte needs no sample. `extra_special` names
    special tokens that the tokenizer must have in addition to those of the settings.

    Raises:
        ConfigError: the sample cannot fill the vocabulary, or has more characters than the vocabulary can hold; or the supplied
            tokenizer cannot be read, or lacks a token that is needed.
    """
    if settings.path is not None:
        return _supplied(settings.path, settings, extra_special)
    extra = tuple(dict.fromkeys((*settings.extra_special, *extra_special)))
    if settings.kind == "byte":
        return ByteTokenizer(extra)
    if settings.kind == "char":
        return CharacterTokenizer(alphabet_of(sample), extra)
    return SentencePieceTokenizer(_train_sentencepiece(sample, settings, extra), settings.kind)


def _supplied(path: Path, settings: TokenizerSettings, needed: Sequence[str]) -> Tokenizer:
    chosen = {role: name for role in ("pad", "unk", "bos", "eos") if (name := getattr(settings, f"{role}_token")) is not None}
    tokenizer = open_supplied(path, chosen)
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


def _train_sentencepiece(sample: Sequence[str], settings: TokenizerSettings, control_symbols: Sequence[str]) -> bytes:
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for piece in sample for part in piece.split(_UNKNOWN_MARK) if part),
            model_writer=model,
            model_type=settings.kind,
            vocab_size=settings.vocab_size,
            hard_vocab_limit=True,
            num_threads=settings.train_threads,
            pad_id=PAD_ID,
            unk_id=UNK_ID,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
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
        )
    except RuntimeError as error:
        raise _explain(str(error), settings) from None
    return without_provenance(model.getvalue())


def _explain(message: str, settings: TokenizerSettings) -> ConfigError:
    asked = f"tokenizer.vocab_size = {settings.vocab_size}"
    if match := re.search(r"Vocabulary size too high .*? value <= (\d+)", message):
        return ConfigError(f"{asked}: the training text allows {match[1]} at most; set {match[1]} or less, or add text")
    if match := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"{asked}: the training text needs {match[1]} for its characters alone; set more than that, "
            "or lower tokenizer.character_coverage"
        )
    if "sentences_.empty" in message:
        return ConfigError(f"{asked}: there is no training text to train a tokenizer on; add text, or set tokenizer.kind to byte")
    return ConfigError(f"{asked}, tokenizer.kind = {settings.kind}: SentencePiece cannot train on this text: {message.strip()}")
