from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline import tokenizer as tokenizer_module
from data_pipeline.config import TokenizerSettings
from data_pipeline.errors import ConfigError, PreparedDataError
from data_pipeline.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer, load_tokenizer
from data_pipeline.tokenizer_training import alphabet_of, sample_pieces, train_tokenizer

WORDS = [
    a + b + c
    for a in ("re", "con", "de", "un", "pro")
    for b in ("turn", "form", "duc", "fin")
    for c in ("ed", "ing", "tion", "able")
]
SAMPLE = [
    f"def {word}_{n}(x):\n\tif x > {n * 37}:\n        return [x, '{other}']  # the {word} of {other}: naïve, 日本語\n"
    for n, (word, other) in enumerate(zip(WORDS * 5, WORDS[7:] * 5, strict=False))
]

valid_text = st.text(st.characters(exclude_categories=["Cs"]))
tricky_text = st.lists(
    st.sampled_from(
        ["\u2581", " ", "  ", "\n", "\t", "\0", "<s>", "<pad>", "<0x41>", "\u2585", "\ufeff", "e\u0301", "def ", "日本", "9" * 9]
    )
    | valid_text
).map("".join)


def trained(kind: str, **settings: object) -> Tokenizer:
    return train_tokenizer(SAMPLE, TokenizerSettings(kind=kind, vocab_size=400, **settings))


@pytest.fixture(scope="module")
def tokenizer_of() -> Callable[[str], Tokenizer]:
    built = {kind: trained(kind) for kind in ("bpe", "unigram", "char", "byte")}
    return built.__getitem__


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte"])
@given(text=tricky_text)
def test_every_valid_text_comes_back_exactly(tokenizer_of: Callable[[str], Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(3 < i < tokenizer.vocab_size for i in ids)


@given(text=st.text(st.sampled_from(alphabet_of(SAMPLE))))
def test_characters_of_the_alphabet_come_back_exactly(tokenizer_of: Callable[[str], Tokenizer], text: str) -> None:
    tokenizer = tokenizer_of("char")
    assert len(tokenizer.encode(text)) == len(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_character_outside_the_alphabet_is_unknown_and_shown_as_such() -> None:
    tokenizer = CharacterTokenizer("abc")
    assert tokenizer.encode("a\U0010ffffbдc") == [4, tokenizer.unk_id, 5, tokenizer.unk_id, 6]
    assert tokenizer.decode([4, 1, 5]) == "a\ufffdb"


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_a_batch_encodes_as_its_texts_do_alone(tokenizer_of: Callable[[str], Tokenizer], kind: str) -> None:
    tokenizer, texts = tokenizer_of(kind), ["one ▁ mark", "", *SAMPLE[:9]]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@given(text=st.text("ab \n9", max_size=60))
def test_long_text_is_cut_for_sentencepiece_where_that_changes_nothing(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizer_of(kind)
    whole = tokenizer.encode(text)
    parts = tokenizer_module._cut_at_spaces(text, 8)
    assert "".join(parts) == text
    if all(part.startswith(" ") for part in parts[1:]):
        assert [i for part in parts for i in tokenizer.encode(part)] == whole


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_special_ids_stand_for_no_text(tokenizer_of: Callable[[str], Tokenizer], kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = [tokenizer.bos_id, *tokenizer.encode("return x"), tokenizer.eos_id, tokenizer.pad_id]
    assert tokenizer.decode(ids) == "return x"
    assert (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_a_tokenizer_is_the_same_after_it_was_written_and_loaded(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    (tmp_path / tokenizer.file_name).write_bytes(tokenizer.to_bytes())
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.vocab_size, loaded.digest) == (kind, tokenizer.vocab_size, tokenizer.digest)
    assert loaded.encode(SAMPLE[3]) == tokenizer.encode(SAMPLE[3])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_training_twice_gives_the_same_bytes(kind: str) -> None:
    assert trained(kind).to_bytes() == trained(kind).to_bytes()


def test_the_digest_is_that_of_the_vocabulary_and_not_of_the_file() -> None:
    few, many = trained("bpe", train_threads=1), trained("bpe", train_threads=2)
    assert few.to_bytes() != many.to_bytes()
    assert few.digest == many.digest
    assert trained("unigram").digest != few.digest


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_the_size_that_works(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size = 9000: the training text allows (\d+) at most") as caught:
        train_tokenizer(SAMPLE, TokenizerSettings(kind=kind, vocab_size=9000))
    allowed = int(str(caught.value).split(" allows ")[1].split()[0])
    assert train_tokenizer(SAMPLE, TokenizerSettings(kind=kind, vocab_size=allowed)).vocab_size == allowed


def test_a_vocabulary_too_small_for_the_characters_is_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"needs \d+ for its characters alone"):
        train_tokenizer(["".join(map(chr, range(0x4E00, 0x4F00))) * 3], TokenizerSettings(kind="bpe", vocab_size=264))


@pytest.mark.parametrize("character", ["\t", "\n", "\u2581", "\u2585", "<s>", "\0"])
def test_text_is_trained_on_whatever_characters_stand_in_it(character: str) -> None:
    tokenizer = train_tokenizer([f"{character}{text}" for text in SAMPLE], TokenizerSettings(kind="bpe", vocab_size=400))
    assert len(tokenizer.encode("return")) < len("return")


def test_the_sample_is_drawn_by_content_whatever_stands_around_it() -> None:
    drawn = list(sample_pieces(SAMPLE, 0.5))
    assert 0.3 * len(SAMPLE) < len(drawn) < 0.7 * len(SAMPLE)
    assert list(sample_pieces(SAMPLE[::-1], 0.5)) == drawn[::-1]
    assert list(sample_pieces(SAMPLE, 1.0)) == SAMPLE
    assert list(sample_pieces(SAMPLE, 7.5)) == SAMPLE


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreparedDataError, match="no tokenizer in it"):
        load_tokenizer(tmp_path)
    for name, data in (("bpe.model", b"\x00\xff"), ("characters.json", b"{}"), ("characters.json", b"[")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(PreparedDataError, match=f"{name}: not a tokenizer that can be read"):
            load_tokenizer(tmp_path)
        (tmp_path / name).unlink()


def test_bytes_that_are_no_text_decode_to_replacement_characters() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(np.array([4 + 0xE2, 4 + 0x41], np.uint16).tolist()) == "\ufffdA"
