"""Special tokens in the text of a template are those that the library `tokenizers` finds, with the white space around them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

from data_pipeline.conversations.chat_template import ChatTemplate
from data_pipeline.conversations.rendering import encode_pieces
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer

NAMES = ("<a>", "END", "END2", "||", "_x")
BESIDE = (
    "a",
    "b ",
    " ",
    "\n",
    "\t\u3000",
    "\x1c",
    "\x1f ",
    "\x85",
    "\u200b",
    "é",
    "_",
    "\u0301",
    "½",
    "\u200d",
    "7",
    "-",
    "Ⓐ",
    "日",
)
flags = st.fixed_dictionaries({name: st.booleans() for name in ("lstrip", "rstrip", "single_word")})
texts = st.lists(st.sampled_from((*NAMES, *BESIDE)), max_size=9).map("".join)


def library(names: Sequence[tuple[str, dict[str, bool]]], ordinary: dict[str, bool]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(ByteLevel.alphabet())}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, **one) for name, one in names])
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False, **ordinary)])
    return tokenizer


def assert_equal_ids(found: Tokenizer, texts: Sequence[str]) -> None:
    tokenizer = HuggingFaceTokenizer(found.to_str().encode())
    template = ChatTemplate.of("", tokenizer)
    for text in texts:
        borders = [0, *(border for span in template.special_in(text) for border in span), len(text)]
        pieces = [(text[start:end], bool(place % 2)) for place, (start, end) in enumerate(pairwise(borders))]
        ids = encode_pieces(tokenizer, [piece for piece in pieces if piece[0]])
        assert ids == found.encode(text, add_special_tokens=False).ids, text


@settings(max_examples=40)
@given(st.tuples(*(st.tuples(st.just(name), flags) for name in NAMES)), flags, st.lists(texts, min_size=5, max_size=20))
def test_the_ids_are_those_of_the_library(
    names: tuple[tuple[str, dict[str, bool]], ...], ordinary: dict[str, bool], texts: list[str]
) -> None:
    assert_equal_ids(library(names, ordinary), texts)


@pytest.mark.parametrize("kind", ["lstrip", "rstrip", "single_word"])
def test_each_character_beside_a_token_is_judged_as_in_the_library(kind: str) -> None:
    found = library([("END", {kind: True})], {})
    codes = (*range(0x180), *range(0x200, 0x3100, 7), *range(0x24B0, 0x24F0), *range(0x1F120, 0x1F190, 3))
    known = [chr(code) for code in codes if unicodedata.category(chr(code)) != "Cn"]  # the library may know a newer Unicode
    assert_equal_ids(found, [f"x{one}END{one}x" for one in known])
