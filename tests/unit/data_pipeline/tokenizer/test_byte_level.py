import inspect
import itertools
import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.tokenizer import HuggingFaceTokenizer, word_cache
from data_pipeline.tokenizer.byte_level import Borders, borders_of
from data_pipeline.tokenizer.word_cache import WordCache

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<a b>"]
TRAINING_TEXT = (
    inspect.getsource(random) + "naïve café  日本語の文  🙂🙂  \t\tx\n\n it's we'll 'll \xa0\xa0 1234567. <tool>  <a b>\r\n" * 40
)

PreTokenizer = pre_tokenizers.PreTokenizer
Library = tokenizers.Tokenizer


def byte_level(*, use_regex: bool = True, prefix: bool = False) -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)


def split_by(pattern: str, behavior: str = "isolated", *, invert: bool = False) -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior, invert=invert), byte_level(use_regex=False)])


def after_digits(*, prefix: bool = False, individual: bool = True) -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual), byte_level(prefix=prefix)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": byte_level,
    "gpt-2 with a space put in front": lambda: byte_level(prefix=True),
    "gpt-2 as a split": lambda: split_by(GPT2),
    "gpt-2 after digits": after_digits,
    "gpt-2 after numbers, with spaces put in front": lambda: after_digits(prefix=True, individual=False),
    "llama 3": lambda: split_by(LLAMA3),
    "llama 3 written inside out": lambda: split_by(LLAMA3, "removed", invert=True),
    "llama 3 and then gpt-2": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level(use_regex=True)]
    ),
    "qwen 2": lambda: split_by(QWEN2),
    "o200k": lambda: split_by(O200K),
}
ADDED = {
    "no tokens added": [],
    "tags": ["<tool>", "</tool>"],
    "runs of white space": ["  ", "   ", "\t\t"],
    "tokens with spaces inside": [" x", "e.\n", "a b", "b>", "é "],
}

SYMBOLS = [" ", "\n", "\t", "\xa0", "'", "s", "a", "1", ".", "/", "日", "\u0301"]
FRAGMENTS = [
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\t\t", "\v", "\x1c", "\x85", "\xa0", "\u2003", "\u2028", "\u3000", "\0"),
    *("'", "'s", "'S", "'ll", "n't", "'\u017f", "\u2019s", "''", "a", "x", "A", "b>", "the", " the", "random", "Random", "self."),
    *("1", "42", "1234567", "٣", "½", "1,234.5", ".", "...", "/", "//", ",", "(", "_", "<", "=", ";", "`", "\u037e", "\u212a", "K"),
    *("é", "e\u0301", "\u0301", "\u0338", "日本", "の文", "🙂", "👩\u200d👩", "ß", "\u0130", "\u200b", "\ufeff"),
    *("<|endoftext|>", "<a b>", "<tool>", "</tool>", "a b", "é ", "e\u0301 "),
    *TRAINING_TEXT[:6000].split("\n")[::9],
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(st.characters(exclude_categories=["Cs"])), max_size=14).map("".join)


@cache
def library(kind: str, added: str = "no tokens added", *, nfc: bool = False) -> Library:
    tokenizer = Library(models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind]()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT.split("\n\n"), trainer)
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in ADDED[added]])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.encode_special_tokens = True
    return tokenizer


def opened(of: Library) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(of.to_str().encode())


@cache
def tokenizer_of(kind: str, added: str, *, nfc: bool) -> HuggingFaceTokenizer:
    return opened(library(kind, added, nfc=nfc))


def ids_of(of: Library, documents: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in of.encode_batch(documents, add_special_tokens=False)]


def borders(of: Library) -> Borders:
    found = borders_of(json.loads(of.to_str()))
    assert found is not None
    return found


def parts_of(text: str, found: Borders) -> list[str]:
    data = text.encode()
    places = {i for i in range(1, len(data)) if found.may_cut[data[i - 1] | data[i] << 8]}
    cuts = sorted(places | {0, len(data)} | set(found.in_white_space(data, np.array([len(data)])).tolist()))
    return [data[start:end].decode() for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@given(added=st.sampled_from(list(ADDED)), nfc=st.booleans(), documents=st.lists(texts, max_size=6), order=st.randoms())
def test_the_ids_are_those_of_the_library_whatever_the_cache_holds(
    kind: str, added: str, nfc: bool, documents: list[str], order: random.Random
) -> None:
    tokenizer = tokenizer_of(kind, added, nfc=nfc)
    assert tokenizer._words is not None
    assert tokenizer.encode_batch(documents) == ids_of(library(kind, added, nfc=nfc), documents)
    small = WordCache(tokenizer._words._may_cut, tokenizer._words._encode_words, max_words=64, max_ids=64)
    with mock.patch.object(word_cache, "_BLOCK_BYTES", 48), mock.patch.object(tokenizer, "_words", small):
        for _ in range(2):
            order.shuffle(documents)
            assert tokenizer.encode_batch(documents) == ids_of(library(kind, added, nfc=nfc), documents)


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_every_short_text_is_divided_as_its_parts_are(kind: str) -> None:
    divide = PRE_TOKENIZERS[kind]().pre_tokenize_str
    found = borders(library(kind))
    divisions = cache(lambda part: [division for division, _ in divide(part)])
    wrong = [
        text
        for text in map("".join, itertools.product(SYMBOLS, repeat=4))
        if divisions(text) != [division for part in parts_of(text, found) for division in divisions(part)]
    ]
    assert not wrong


def test_a_text_is_cut_into_words_and_not_into_more() -> None:
    text = "It's (one) word.\n\n  Two\n words, 3.14 \xa0x"
    expected = {
        "gpt-2": ["It's", " (", "one", ")", " word", ".", "\n\n ", " Two", "\n", " words", ",", " 3", ".", "14", " \xa0x"],
        "gpt-2 with a space put in front": ["It's", " (one)", " word.\n\n ", " Two\n", " words,", " 3.14", " \xa0x"],
        "llama 3": ["It's", " (one", ")", " word", ".\n\n ", " Two", "\n", " words", ",", " 3", ".", "14", " \xa0x"],
        "o200k": ["It's", " (one", ")", " word", ".\n\n ", " Two", "\n", " words", ",", " 3", ".", "14", " \xa0x"],
    }
    assert {kind: parts_of(text, borders(library(kind))) for kind in expected} == expected


def test_no_cut_is_made_behind_what_the_library_takes_for_white_space() -> None:
    everything = "".join(map(chr, range(0xD800)))
    white_space = [character for character, _ in pre_tokenizers.Split(Regex(r"\S"), "removed").pre_tokenize_str(everything)]
    assert len("".join(white_space)) == 25  # as many have the property White_Space in Unicode
    found = borders(library("gpt-2"))
    assert not [character for character in "".join(white_space) if found.may_cut[character.encode()[-1] | ord(" ") << 8]]


def test_white_space_is_not_cut_where_one_text_ends_and_the_next_begins() -> None:
    tokenizer = tokenizer_of("gpt-2", "no tokens added", nfc=False)
    documents = ["x    ", "x    ", "", "x \n ", " x"]
    assert tokenizer.encode_batch(documents) == ids_of(library("gpt-2"), documents)


def test_what_is_in_front_of_a_tag_or_a_digit_that_is_split_off_stays_whole() -> None:
    assert parts_of("x    <tool>", borders(library("gpt-2", "tags"))) == ["x", "    <tool>"]
    assert parts_of("x    1", borders(library("gpt-2 after digits"))) == ["x", "    1"]
    assert parts_of("x    1", borders(library("gpt-2"))) == ["x", "   ", " 1"]


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(library("llama 3").to_str()) | changes).encode()


def with_token(name: str, **properties: bool) -> bytes:
    tokenizer = Library.from_str(changed().decode())
    if properties.pop("nfc", False):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(name, **properties)])
    return tokenizer.to_str().encode()


def with_pre_tokenizer(part: PreTokenizer | None) -> bytes:
    tokenizer = Library.from_str(changed().decode())
    tokenizer.pre_tokenizer = part or pre_tokenizers.Sequence([])
    return tokenizer.to_str().encode() if part else changed(pre_tokenizer=None)


UNKNOWN: dict[str, Callable[[], bytes]] = {
    "no pre-tokenizer": lambda: with_pre_tokenizer(None),
    "no expression": lambda: with_pre_tokenizer(byte_level(use_regex=False)),
    "digits alone": lambda: with_pre_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level(use_regex=False)])
    ),
    "another expression": lambda: with_pre_tokenizer(split_by(r"\S+ \S+|\s+")),
    "a second expression": lambda: with_pre_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\S+ \S+"), "isolated"), byte_level()])
    ),
    "a third part": lambda: with_pre_tokenizer(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.Punctuation(), byte_level(use_regex=False)]
        )
    ),
    "divisions joined again": lambda: with_pre_tokenizer(split_by(LLAMA3, "merged_with_next")),
    "matches thrown away": lambda: with_pre_tokenizer(split_by(LLAMA3, "removed")),
    "words of another kind": lambda: with_pre_tokenizer(pre_tokenizers.Metaspace()),
    "bytes first": lambda: with_pre_tokenizer(
        pre_tokenizers.Sequence([byte_level(use_regex=False), pre_tokenizers.Split(Regex(LLAMA3), "isolated")])
    ),
    "a normaliser that may strip": lambda: changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
    "another model": lambda: changed(model={"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}, added_tokens=[]),
    "a token that takes the space behind it": lambda: with_token("random", rstrip=True),
    "a token that takes the space before it": lambda: with_token("random", lstrip=True),
    "a token that is a whole word": lambda: with_token("random", single_word=True),
    "a token that NFC spells otherwise": lambda: with_token("é x", nfc=True, normalized=True),
    "a token that NFC composes": lambda: with_token("K b", nfc=True, normalized=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tokenizer_with_a_part_that_is_not_known_to_allow_cuts_encodes_texts_whole(name: str) -> None:
    content = UNKNOWN[name]()
    tokenizer = HuggingFaceTokenizer(content)
    assert tokenizer._words is None
    plain = Library.from_str(content.decode())
    plain.encode_special_tokens = True
    documents = ["", "random  random\n\n x", " a  b1 ", "\u212a b e\u0301 x"]
    assert tokenizer.encode_batch(documents) == ids_of(plain, documents)


def test_joins_left_out_by_chance_are_not_remembered() -> None:
    model = json.loads(library("llama 3").to_str())["model"]
    assert HuggingFaceTokenizer(changed(model=model | {"dropout": 0.5}))._words is None
    assert HuggingFaceTokenizer(changed(model=model | {"dropout": 0.0}))._words is not None


def test_a_token_read_in_a_text_is_found_across_words_and_hides_those_inside_it() -> None:
    tokenizer = Library.from_str(library("gpt-2").to_str())
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in (" b", "x y", "c.d")])
    tokenizer.encode_special_tokens = True
    documents = ["<a b> ax y c.d b"]
    ids = ids_of(tokenizer, documents)
    assert opened(tokenizer).encode_batch(documents) == ids
    assert [ids[0].count(tokenizer.token_to_id(name)) for name in ("x y", "c.d")] == [1, 1]


def test_what_the_file_would_put_around_or_beside_a_text_is_left_out() -> None:
    tokenizer = Library.from_str(library("gpt-2").to_str())
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert opened(tokenizer).encode("two words") == ids_of(library("gpt-2"), ["two words"])[0]
