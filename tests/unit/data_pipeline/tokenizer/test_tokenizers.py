from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, PreparedDataError
from data_pipeline.config import TokenizerConfig
from data_pipeline.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    load_tokenizer,
    open_supplied,
    round_trip_failures,
    save_tokenizer,
    sentence_pieces,
    supplied_files,
)
from data_pipeline.tokenizer.training import alphabet_of, fitting_vocab_size, sample_pieces, train_tokenizer

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


EXTRA = ("<|user|>", "<|fim_prefix|>")


def trained(kind: str, **settings: object) -> Tokenizer:
    return train_tokenizer(SAMPLE, TokenizerConfig(kind=kind, vocab_size=400, **settings), EXTRA)


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
    parts = sentence_pieces._cut_at_spaces(text, 8)
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
@pytest.mark.parametrize("note", ["record.json", "manifest.json"])
def test_a_run_or_prepared_data_supplies_its_tokenizer_with_the_same_digest(kind: str, note: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        open_supplied(tmp_path / "run", {})
    (tmp_path / "run" / note).write_text("{}")
    supplied = open_supplied(tmp_path / "run", {})
    assert (supplied.kind, supplied.digest, supplied.token_id(EXTRA[0])) == (kind, tokenizer.digest, tokenizer.token_id(EXTRA[0]))
    assert supplied_files(tmp_path / "run") == [tmp_path / "run" / "tokenizer" / tokenizer.file_name]
    with pytest.raises(ConfigError, match=r"eos_token is set, and tokenizer.path = .* is used as it is; leave"):
        open_supplied(tmp_path / "run", {"eos": "</s>"})
    (tmp_path / "run" / "tokenizer" / tokenizer.file_name).write_bytes(b"[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.path: .*not a tokenizer that can be read"):
        open_supplied(tmp_path / "run", {})


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_a_tokenizer_is_the_same_after_it_was_written_and_loaded(kind: str, tmp_path: Path) -> None:
    tokenizer = trained(kind)
    save_tokenizer(tokenizer, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.kind, loaded.vocab_size, loaded.digest) == (kind, tokenizer.vocab_size, tokenizer.digest)
    assert loaded.encode(SAMPLE[3]) == tokenizer.encode(SAMPLE[3])


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_training_twice_gives_the_same_bytes(kind: str) -> None:
    assert trained(kind).to_bytes() == trained(kind).to_bytes()


def test_a_model_file_says_nothing_of_how_many_threads_trained_it() -> None:
    few, many = trained("bpe", train_threads=1), trained("bpe", train_threads=2)
    assert few.to_bytes() == many.to_bytes()
    assert few.digest == many.digest


def test_the_digest_tells_tokenizers_apart() -> None:
    tokenizers = [*map(trained, ("bpe", "unigram", "char", "byte")), ByteTokenizer(), ByteTokenizer(EXTRA[::-1])]
    tokenizers.append(train_tokenizer(SAMPLE[::2], TokenizerConfig(kind="bpe", vocab_size=400), EXTRA))
    assert len({tokenizer.digest for tokenizer in tokenizers}) == len(tokenizers)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
def test_no_text_produces_a_special_token(tokenizer_of: Callable[[str], Tokenizer], kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = [tokenizer.token_id(name) for name in EXTRA]
    assert None not in ids
    assert len(set(ids)) == 2
    assert tokenizer.token_id("<|unheard-of|>") is None
    assert max(i for i in ids if i is not None) < tokenizer.vocab_size
    assert not set(ids) & set(tokenizer.encode("".join(EXTRA)))
    assert tokenizer.decode([i for i in ids if i is not None]) == ""


@pytest.mark.parametrize("name", ["", " ", "two words", "\u2581", "<pad>", "</s>"])
def test_a_special_token_with_an_unusable_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="extra_special"):
        TokenizerConfig(extra_special=(name,))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char", "byte"])
@pytest.mark.parametrize(("add_bos", "add_eos"), [(False, False), (True, False), (False, True), (True, True)])
@given(texts=st.lists(tricky_text))
def test_documents_stand_between_bos_and_eos(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, add_bos: bool, add_eos: bool, texts: list[str]
) -> None:
    tokenizer = tokenizer_of(kind)
    encoded = tokenizer.frame(tokenizer.encode_flat(texts), add_bos=add_bos, add_eos=add_eos)
    assert [ids.tolist() for ids in encoded.arrays()] == [[2] * add_bos + tokenizer.encode(text) + [3] * add_eos for text in texts]
    assert encoded.ids_T.dtype == np.int32
    assert len(encoded.ids_T) == (encoded.ends_D[-1] if texts else 0)


def test_round_trip_failures_are_counted(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    texts = ["return", "\U0001f600", "x" * 9, "\u0416"]
    assert round_trip_failures(tokenizer_of("bpe"), texts) == 0
    assert round_trip_failures(tokenizer_of("char"), texts) == 2


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused_with_the_size_that_works(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size = 9000: the training text allows (\d+) at most") as caught:
        train_tokenizer(SAMPLE, TokenizerConfig(kind=kind, vocab_size=9000))
    allowed = int(str(caught.value).split(" allows ")[1].split()[0])
    assert train_tokenizer(SAMPLE, TokenizerConfig(kind=kind, vocab_size=allowed)).vocab_size == allowed


def test_a_vocabulary_too_small_for_the_characters_is_refused_with_their_number() -> None:
    with pytest.raises(ConfigError, match=r"needs \d+ for its characters alone"):
        train_tokenizer(["".join(map(chr, range(0x4E00, 0x4F00))) * 3], TokenizerConfig(kind="bpe", vocab_size=264))


@pytest.mark.parametrize("character", ["\t", "\n", "\u2581", "\u2585", "<s>", "\0"])
def test_text_is_trained_on_whatever_characters_stand_in_it(character: str) -> None:
    tokenizer = train_tokenizer([f"{character}{text}" for text in SAMPLE], TokenizerConfig(kind="bpe", vocab_size=400))
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


def test_characters_beyond_the_coverage_are_encoded_as_bytes() -> None:
    sample = ["return the value of x " * 20] * 50 + ["\u0416"]
    settings = {"kind": "bpe", "vocab_size": 290}
    lengths = [
        len(train_tokenizer(sample, TokenizerConfig(**settings, character_coverage=share)).encode("\u0416"))
        for share in (0.999, 1.0)
    ]
    assert lengths == [2, 1]


@pytest.mark.parametrize(
    ("num_bytes", "size"), [(0, 1024), (2_000_000, 1024), (2_000_001, 4096), (10**9, 16_384), (10**15, 65_536)]
)
def test_the_size_of_a_vocabulary_follows_from_the_amount_of_text(num_bytes: int, size: int) -> None:
    assert fitting_vocab_size(num_bytes) == size


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_size_that_is_chosen_fits_repetitive_text_and_text_of_many_characters(kind: str) -> None:
    settings = TokenizerConfig(kind=kind, vocab_size="auto", character_coverage=1)
    repetitive = train_tokenizer(["the same words again\n" * 50], settings)
    assert 264 <= repetitive.vocab_size < 1024
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))
    many = train_tokenizer([characters[start : start + 40] for start in range(0, 3000, 8)], settings)
    assert many.vocab_size > 3000
    for tokenizer in (repetitive, many):
        assert tokenizer.decode(tokenizer.encode("the 一二 \U0001f600")) == "the 一二 \U0001f600"


def test_a_size_that_is_given_is_kept_or_refused() -> None:
    assert trained("bpe").vocab_size == 400
    with pytest.raises(ConfigError, match="allows"):
        train_tokenizer(["the same words again\n" * 50], TokenizerConfig(vocab_size=1024))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_space_is_a_space_also_for_a_model_of_text_without_one(kind: str) -> None:
    tokenizer = train_tokenizer(["abcdefgh" * 9, "badcfehg" * 9], TokenizerConfig(kind=kind, vocab_size="auto"))
    assert tokenizer.decode(tokenizer.encode("ab c\u2581 d")) == "ab c\u2581 d"
