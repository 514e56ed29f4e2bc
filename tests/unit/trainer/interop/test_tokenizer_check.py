"""The check that an export makes before it writes a tokenizer."""

from __future__ import annotations

import json

import pytest

from common.errors import ConfigError
from data_pipeline.tokenizer import SentencePieceTokenizer, Tokenizer
from tests.support.exported import KINDS, tokenizer_of
from trainer.interop.tokenizer_json import Json, check_tokenizer, library_of, tokenizer_json


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_every_exact_kind_passes(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    check_tokenizer(tokenizer, library_of(tokenizer_json(tokenizer)), exact=True)


def test_a_unigram_tokenizer_is_refused_with_the_reason_unless_other_ids_are_allowed() -> None:
    tokenizer = tokenizer_of("unigram")
    library = library_of(tokenizer_json(tokenizer))
    with pytest.raises(ConfigError, match=r"adds the scores of pieces in 32 bits .* --inexact_tokenizer"):
        check_tokenizer(tokenizer, library, exact=True)
    check_tokenizer(tokenizer, library, exact=False)


def without(content: Json, part: str) -> Json:
    return content | {part: None}


def with_shorter_part_first(content: Json) -> Json:
    changed: Json = json.loads(json.dumps(content))
    changed["model"]["merges"].reverse()
    return changed


def with_marks_for_spaces(content: Json) -> Json:
    return content | {"normalizer": {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}}


def with_a_token_in_texts(content: Json) -> Json:
    tokens = [token | {"special": False} for token in content["added_tokens"]]
    return content | {"added_tokens": tokens}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda content: without(content, "post_processor"), "the text '' has the ids"),
        (lambda content: without(content, "decoder"), "is decoded as"),
        (with_shorter_part_first, "has the ids"),
        (with_marks_for_spaces, "u2581|\u2581"),
        (with_a_token_in_texts, "<"),
    ],
)
def test_the_first_text_that_differs_is_named(changed: object, message: str) -> None:
    tokenizer: Tokenizer = tokenizer_of("bpe")
    assert callable(changed)
    with pytest.raises(ConfigError, match=message) as caught:
        check_tokenizer(tokenizer, library_of(changed(tokenizer_json(tokenizer))), exact=True)
    assert "cannot be exported exactly: the text" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pieces_that_repeat_themselves_are_tried_in_runs() -> None:
    tokenizer = tokenizer_of("bpe")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    repeated = [piece.name for piece in tokenizer.pieces if len(piece.name) > 3 and len(set(piece.name)) == 1]
    assert repeated, "the sample has no long runs"
    content = tokenizer_json(tokenizer)
    name = repeated[0].replace("\u2581", " ")
    content["model"]["merges"] = [pair for pair in content["model"]["merges"] if "".join(pair) != name]
    with pytest.raises(ConfigError, match="has the ids"):
        check_tokenizer(tokenizer, library_of(content), exact=True)
