import inspect
import io
import random
from functools import cache
from unittest import mock

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.tokenizer import SentencePieceTokenizer, word_cache
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK
from data_pipeline.tokenizer.word_cache import WordCache, places_to_cut

TRAINING_TEXT = inspect.getsource(random) + "naïve  日本語の文  🙂🙂  \t\tx\n\n" * 40

MODELS: dict[str, dict[str, object]] = {
    "ours": {"add_dummy_prefix": False, "allow_whitespace_only_pieces": True, "split_digits": True},
    "with a space put in front": {"add_dummy_prefix": True, "split_digits": True},
    "pieces across spaces and scripts": {"add_dummy_prefix": False, "split_by_whitespace": False, "split_by_unicode_script": False},
    "user-defined symbols": {"add_dummy_prefix": False, "user_defined_symbols": ["def random(", "random", " the ", "日🙂"]},
}

SHORT = [
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    "\0",
    "a",
    "a\0",
    ".",
    "42",
    "日本",
    "🙂",
    "é",
    "e\u0301",
    "<s>",
    "\u2585",
    SPACE_MARK,
]
LONG = [
    "random",
    "def random(",
    " the ",
    "self",
    "x" * 15,
    "x" * 16,
    "supercalifragilistic",
    *TRAINING_TEXT[:6000].split("\n")[::9],
]
pieces_of_text = st.sampled_from([*SHORT, *LONG])
texts = st.lists(pieces_of_text | st.text(st.characters(exclude_categories=["Cs"])), max_size=12).map("".join)


@cache
def model(name: str) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT.split("\n\n")),
        model_writer=written,
        model_type="bpe",
        vocab_size=1500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **MODELS[name],
    )
    return written.getvalue()


@cache
def processor(name: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model(name))


@cache
def tokenizer_of(name: str) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(model(name), "sentencepiece")


def words_of(tokenizer: SentencePieceTokenizer) -> WordCache:
    assert tokenizer._words is not None
    return tokenizer._words


@pytest.mark.parametrize("name", MODELS)
@given(documents=st.lists(texts, max_size=6))
def test_the_ids_are_those_that_sentencepiece_gives(name: str, documents: list[str]) -> None:
    assert words_of(tokenizer_of(name))
    encoded = tokenizer_of(name).encode_flat(documents)
    assert [ids.tolist() for ids in encoded.arrays()] == processor(name).encode(documents)


@pytest.mark.parametrize("name", MODELS)
@given(documents=st.lists(texts, max_size=9), order=st.randoms())
def test_what_the_cache_holds_and_where_blocks_end_changes_nothing(name: str, documents: list[str], order: random.Random) -> None:
    tokenizer = tokenizer_of(name)
    words = words_of(tokenizer)
    small = WordCache(words._may_cut, words._encode_words, max_words=64, max_ids=64)
    with mock.patch.object(word_cache, "_BLOCK_BYTES", 48), mock.patch.object(tokenizer, "_words", small):
        for _ in range(2):
            assert tokenizer.encode_batch(documents) == processor(name).encode(documents)
            order.shuffle(documents)


def test_a_word_is_not_taken_for_the_same_with_zero_bytes_behind_it() -> None:
    cache = WordCache(places_to_cut(["▁a\0\0"], "▁", (" ",)), lambda words: [np.array([len(word)], np.int32) for word in words])
    text = b" a a\0 a\0\0 a"
    for _ in range(2):
        assert cache.encode(text, np.array([len(text)]), np.array([len(text)]))[0].tolist() == [2, 3, 4, 2]


@pytest.mark.parametrize("num_words", [1, 7, 2000])
def test_words_longer_than_a_block_are_encoded_alone(num_words: int) -> None:
    tokenizer = SentencePieceTokenizer(model("ours"), "bpe")
    with mock.patch.object(word_cache, "_BLOCK_BYTES", 100):
        text = " ".join(["x" * 99 + "日本" * 200, "y" * 1000, "random"][index % 3] for index in range(num_words))
        assert tokenizer.encode(text) == processor("ours").encode(text)


def test_a_full_cache_starts_again_and_stays_within_its_bounds() -> None:
    tokenizer = SentencePieceTokenizer(model("ours"), "bpe")
    calls = []
    words = words_of(tokenizer)

    def encode(missed: list[bytes]) -> list[np.ndarray]:
        calls.append(len(missed))
        return words._encode_words(missed)

    small = WordCache(words._may_cut, encode, max_words=1 << 16, max_ids=1 << 16)
    texts = [
        " ".join(f"w{random.Random(n).getrandbits(40):x}" for n in range(start, start + 6000)).encode() for start in (0, 6000, 0)
    ]
    for text in texts:
        ids, before = small.encode(text, np.array([len(text)]), np.array([len(text)]))
        assert ids.tolist() == processor("ours").encode(text.decode())
        assert before.tolist() == [len(ids)]
        assert small._num_words <= 1 << 16
        assert small._num_ids <= 1 << 16
    num_calls = len(calls)
    small.encode(texts[-1], np.array([len(texts[-1])]), np.array([len(texts[-1])]))
    assert len(calls) == num_calls  # what was just encoded is known


def test_a_text_is_cut_where_no_piece_reaches_across_and_nowhere_else() -> None:
    may_cut = places_to_cut(["▁the", "é.", "ab"], "▁", (" ",))
    cuts = {text: may_cut[text.encode()[0] | text.encode()[1] << 8] for text in (" t", "th", "ab", "ba", "e ", "é", "he")}
    assert cuts == {" t": False, "th": False, "ab": False, "ba": True, "e ": True, "é": False, "he": False}
    assert not may_cut["é.".encode()[1] | ord(".") << 8]
    assert may_cut["é,".encode()[1] | ord(",") << 8]


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "unigram"},
        {"byte_fallback": False},
        {"normalization_rule_name": "nmt_nfkc"},
        {"treat_whitespace_as_suffix": True},
    ],
)
def test_a_model_for_which_words_are_not_exact_is_used_without_them(settings: dict[str, object]) -> None:
    written = io.BytesIO()
    options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT.split("\n\n")),
        model_writer=written,
        vocab_size=800,
        minloglevel=2,
        **options | settings,
    )
    tokenizer = SentencePieceTokenizer(written.getvalue(), "sentencepiece")
    texts = ["", " a  b ", "ﬁne ①", "日本🙂" * 3, *TRAINING_TEXT.split("\n\n")[:30]]
    assert tokenizer._words is None
    assert tokenizer.encode_batch(texts) == sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()).encode(texts)
