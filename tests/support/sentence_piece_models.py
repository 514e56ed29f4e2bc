"""SentencePiece models that differ from those that the project trains, as users may supply them."""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece


def model_with_dummy_prefix(sample: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-pair model that adds a space before a text and spells unknown characters as bytes, like Llama's model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sample),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()
