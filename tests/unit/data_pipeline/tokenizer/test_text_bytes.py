from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.sentence_pieces import SPACE_MARK
from data_pipeline.tokenizer.text_bytes import TextBytes, count_text_bytes
from data_pipeline.tokenizer.training import train_tokenizer
from tests.support.sentence_piece_models import model_with_dummy_prefix

TEXT = "The cat sat on the mat, and the naïve dog façade watched 12 345 birds. Straße, größere Wörter.\n\tdef f(x):\n    return x\n"
SAMPLE = [f"{TEXT}{number} {TEXT[number:]}" for number in range(60)]


def trained(settings: TokenizerConfig) -> Tokenizer:
    return train_tokenizer(SAMPLE, settings)


def byte_level() -> Tokenizer:
    """Bytes as GPT-2 writes them, the most frequent pairs joined, some of them parts of characters."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator([*SAMPLE, "\u2018\u2019\u201c\u20ac" * 50], trainer)
    return HuggingFaceTokenizer(library.to_str().encode())


def byte_level_unigram() -> Tokenizer:
    """The same alphabet, and pieces with scores in a list instead of numbers in a table."""
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    library.train_from_iterator([*SAMPLE, "\u2018\u2019\u201c\u20ac" * 50], trainer)
    return HuggingFaceTokenizer(library.to_str().encode())


TOKENIZERS = {
    "byte": ByteTokenizer,
    "char": lambda: CharacterTokenizer("".join(sorted(set("".join(SAMPLE)) | {"\ufffd", "\u20ac"}))),
    "bpe": lambda: trained(TokenizerConfig(kind="bpe", vocab_size=400)),
    "unigram": lambda: trained(TokenizerConfig(kind="unigram", vocab_size=315)),
    "dummy prefix": lambda: SentencePieceTokenizer(model_with_dummy_prefix(SAMPLE, 400), "sentencepiece"),
    "byte-level": byte_level,
    "byte-level unigram": byte_level_unigram,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def counted(request: pytest.FixtureRequest) -> tuple[Tokenizer, TextBytes]:
    tokenizer = TOKENIZERS[request.param]()
    return tokenizer, count_text_bytes(tokenizer)


def size(tokenizer: Tokenizer, counts: TextBytes, text: str) -> int:
    """Bytes of a text by its ids, between bos and eos as in a document."""
    ids_T = tokenizer.frame(tokenizer.encode_flat([text]), add_bos=False, add_eos=tokenizer.eos_id is not None).ids_T.astype(
        np.int64
    )
    return int(counts.count(ids_T, is_first_T=np.arange(len(ids_T)) == 0).sum())


@settings(max_examples=60)
@given(text=st.text(st.sampled_from(sorted(set("".join(SAMPLE)) | {"\ufffd", "\u20ac"})), max_size=60))
def test_the_bytes_of_a_text_are_counted_exactly(counted: tuple[Tokenizer, TextBytes], text: str) -> None:
    assert size(*counted, text) == len(text.encode())


@settings(max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE_MARK), max_size=30))
def test_characters_that_no_piece_has_are_counted_by_their_bytes(counted: tuple[Tokenizer, TextBytes], text: str) -> None:
    tokenizer, counts = counted
    if tokenizer.kind == "char":  # what it does not know is lost, and not counted
        text_kept = [character for character in text if tokenizer.decode(tokenizer.encode(character)) == character]
        assert size(tokenizer, counts, text) == len("".join(text_kept).encode())
    else:
        assert size(tokenizer, counts, text) == len(text.encode())


def test_a_space_mark_in_a_text_of_our_own_tokenizers_is_three_bytes() -> None:
    tokenizer = TOKENIZERS["bpe"]()
    assert size(tokenizer, count_text_bytes(tokenizer), f"a{SPACE_MARK} b") == len(f"a{SPACE_MARK} b".encode())


def test_parts_of_a_text_have_the_bytes_of_the_whole_wherever_it_is_cut(counted: tuple[Tokenizer, TextBytes]) -> None:
    """Also inside a character of several bytes, as packing may cut."""
    tokenizer, counts = counted
    ids_T = np.array(tokenizer.encode(TEXT), np.int64)
    bytes_T = counts.count(ids_T, is_first_T=np.arange(len(ids_T)) == 0)
    texts = [tokenizer.decode(ids_T[: end + 1].tolist()) for end in range(len(ids_T))]
    readable = [number for number, text in enumerate(texts) if "\ufffd" not in text]
    assert len(readable) > len(ids_T) // 2
    assert all(int(bytes_T[: number + 1].sum()) == len(texts[number].encode()) for number in readable)


def test_special_ids_stand_for_no_bytes(counted: tuple[Tokenizer, TextBytes]) -> None:
    tokenizer, counts = counted
    for number in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id):
        if number is not None:
            assert counts.first_V[number] == counts.inner_V[number] == 0


def test_parts_of_characters_of_a_byte_level_vocabulary_have_the_bytes_of_their_names() -> None:
    tokenizer = byte_level()
    counts = count_text_bytes(tokenizer)
    vocabulary = json.loads(tokenizer.to_bytes())["model"]["vocab"]
    parts = {name: number for name, number in vocabulary.items() if "\ufffd" in tokenizer.decode([number]) and len(name) > 1}
    assert parts
    assert all(counts.inner_V[number] == len(name) for name, number in parts.items())
