import inspect
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from data_pipeline.config import FIM_TOKENS, AugmentConfig, TokenizerConfig
from data_pipeline.stages.augment import Augmenter, load_synonyms
from data_pipeline.tokenizer import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from data_pipeline.tokenizer.training import train_tokenizer

SAMPLE = [paragraph for paragraph in inspect.getsource(random).split("\n\n") if len(paragraph) > 40][:80]
texts = st.lists(st.sampled_from(["the ", "cat", "returned", "\n", "日本", "▁", " "]) | st.text(), max_size=8).map("".join)


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return train_tokenizer(SAMPLE, TokenizerConfig(kind=kind, vocab_size=500), FIM_TOKENS)


def undo(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the original text from either order of its three parts."""
    prefix_id, middle_id, suffix_id = (tokenizer.token_id(name) for name in FIM_TOKENS)
    if not ids or ids[0] != prefix_id:
        return tokenizer.decode(ids)
    suffix_at, middle_at = ids.index(suffix_id), ids.index(middle_id)
    prefix, suffix, middle = (
        tokenizer.decode(part) for part in (ids[1:suffix_at], ids[suffix_at + 1 : middle_at], ids[middle_at + 1 :])
    )
    return prefix + middle + suffix


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte"])
@given(documents=st.lists(texts, max_size=5))
def test_fill_in_the_middle_loses_and_adds_no_text(kind: str, documents: list[str]) -> None:
    augmenter = Augmenter(tokenizer_of(kind), AugmentConfig(fim_rate=1))
    encoded, counts = augmenter.encode(documents, ["code"] * len(documents), range(len(documents)))
    assert [undo(tokenizer_of(kind), ids.tolist()) for ids in encoded.arrays()] == documents
    assert counts["fim_psm"] + counts["fim_spm"] == len(documents)


def test_the_parts_are_in_the_order_of_the_paper() -> None:
    tokenizer = ByteTokenizer(FIM_TOKENS)
    names = {tokenizer.token_id(name): name[6:9].upper() for name in FIM_TOKENS}
    for rate, expected, num_shapes in ((0.0, "PRE a SUF c MID b", 10), (1.0, "PRE SUF c MID a b", 4)):
        augmenter = Augmenter(tokenizer, AugmentConfig(fim_rate=1, fim_spm_rate=rate))
        shapes = []
        for number in range(300):
            [ids] = augmenter.encode(["abc"], ["code"], [number])[0].arrays()
            shapes.append(" ".join(names.get(i) or chr(i - 4) for i in ids.tolist()))
        assert expected in shapes  # one cut after a, one after b
        assert len(set(shapes)) == num_shapes  # two cuts among four places; with the suffix first, only one of them shows


def test_only_code_is_cut_and_about_as_often_as_the_setting_says() -> None:
    augmenter = Augmenter(tokenizer_of("byte"), AugmentConfig(fim_rate=0.5, fim_spm_rate=0.25))
    kinds: list[Any] = ["code", "prose", "web"] * 800
    encoded, counts = augmenter.encode(["some text"] * len(kinds), kinds, range(len(kinds)))
    changed = Counter(
        kind for kind, ids in zip(kinds, encoded.arrays(), strict=True) if tokenizer_of("byte").token_id(FIM_TOKENS[0]) in ids
    )
    assert set(changed) == {"code"}
    assert 340 < changed["code"] == counts["fim_psm"] + counts["fim_spm"] < 460
    assert 60 < counts["fim_spm"] < 140


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@given(text=texts, number=st.integers(0, 1 << 40))
def test_pieces_cut_at_random_spell_the_same_text(kind: str, text: str, number: int) -> None:
    tokenizer = tokenizer_of(kind)
    [ids] = Augmenter(tokenizer, AugmentConfig(subword_rate=1, subword_alpha=0.3)).encode([text], ["web"], [number])[0].arrays()
    assert tokenizer.decode(ids.tolist()) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_the_changes_to_a_document_depend_only_on_seed_and_id(kind: str) -> None:
    settings = AugmentConfig(subword_rate=0.7, fim_rate=0.5, subword_alpha=0.3)
    kinds: list[Any] = ["code", "prose"] * (len(SAMPLE) // 2)
    ids = list(range(10**12, 10**12 + len(SAMPLE)))
    whole = [array.tolist() for array in Augmenter(tokenizer_of(kind), settings).encode(SAMPLE, kinds, ids)[0].arrays()]
    for place in (17, 3, 30, 0):
        alone = Augmenter(tokenizer_of(kind), settings).encode([SAMPLE[place]], [kinds[place]], [ids[place]])
        assert alone[0].ids_T.tolist() == whole[place]
    for other_ids, other in (([*ids[1:], 5], settings), (ids, settings.model_copy(update={"seed": 1}))):
        changed = [array.tolist() for array in Augmenter(tokenizer_of(kind), other).encode(SAMPLE, kinds, other_ids)[0].arrays()]
        assert sum(a != b for a, b in zip(changed, whole, strict=True)) > len(SAMPLE) / 3


def test_subword_sampling_changes_the_pieces_of_the_requested_share() -> None:
    augmenter = Augmenter(tokenizer_of("bpe"), AugmentConfig(subword_rate=0.25, subword_alpha=0.5))
    encoded, counts = augmenter.encode(SAMPLE * 20, ["prose"] * len(SAMPLE) * 20, range(len(SAMPLE) * 20))
    plain = tokenizer_of("bpe").encode_batch(SAMPLE * 20)
    num_changed = sum(ids.tolist() != other for ids, other in zip(encoded.arrays(), plain, strict=True))
    assert 0.2 * len(plain) < num_changed <= counts["subword"] < 0.3 * len(plain)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_documents_with_equal_text_are_cut_into_different_pieces(kind: str) -> None:
    augmenter = Augmenter(tokenizer_of(kind), AugmentConfig(subword_rate=1, subword_alpha=0.3))
    encoded, _ = augmenter.encode([SAMPLE[3]] * 20, ["prose"] * 20, range(20))
    assert len({tuple(ids.tolist()) for ids in encoded.arrays()}) > 10


@pytest.fixture
def synonyms(tmp_path: Path) -> Path:
    path = tmp_path / "synonyms.tsv"
    path.write_text("quick\tfast\tnimble\n\nCat\tmouser\ndon't\tdo not\n", encoding="utf-8")
    return path


def replaced(path: Path, text: str, rate: float = 1.0, kind: Any = "prose", number: int = 0) -> str:
    augmenter = Augmenter(tokenizer_of("byte"), AugmentConfig(synonyms=path, synonym_rate=rate))
    return tokenizer_of("byte").decode(augmenter.encode([text], [kind], [number])[0].ids_T.tolist())


def test_whole_words_are_replaced_in_the_same_case(synonyms: Path) -> None:
    text = "cat Cat CAT cAt cats concat cat_x the-cat. Don't 'cat' cat9"
    assert replaced(synonyms, text) == "mouser Mouser MOUSER cAt cats concat mouser_x the-mouser. Do not 'mouser' mouser9"
    assert {replaced(synonyms, "Quick", number=number) for number in range(20)} == {"Fast", "Nimble"}
    assert replaced(synonyms, text, kind="code") == text
    assert replaced(synonyms, "cat", kind="web") == "mouser"


def test_about_the_share_of_the_listed_words_is_replaced(synonyms: Path) -> None:
    augmenter = Augmenter(tokenizer_of("byte"), AugmentConfig(synonyms=synonyms, synonym_rate=0.3))
    _, counts = augmenter.encode(["cat dog " * 100, "dog"], ["prose", "web"], [1, 2])
    assert 15 < counts["synonym_words"] < 45
    assert counts["synonym_documents"] == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", b"two words\tx", "line 1: 'two words' is not one word"),
        ("a.tsv", b"cat\tx\nCAT\ty", "line 2: 'CAT' is listed twice"),
        ("a.tsv", b"cat", "line 1: 'cat' needs at least one synonym"),
        ("a.tsv", b"cat\t x", "without spaces around it"),
        ("a.tsv", b"\xff", "a.tsv: 'utf-8' codec can't decode"),
        ("a.json", b"[1]", "not a JSON object that maps words"),
        ("a.json", b'{"cat": "x"}', "entry 1: 'cat' needs at least one synonym"),
        ("a.json", b"{" * 10, "a.json: Expecting property name"),
        ("a.json", b"[" * 100_000, "a.json: maximum recursion"),
    ],
)
def test_a_malformed_file_of_synonyms_is_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_synonyms(tmp_path / name)
    assert message in str(caught.value)


def test_synonyms_can_be_read_from_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"Cat": ["mouser", "big cat"]}')
    assert load_synonyms(tmp_path / "a.json") == {"cat": ("mouser", "big cat")}
    with pytest.raises(ConfigError, match=r"b\.json cannot be read"):
        load_synonyms(tmp_path / "b.json")


def test_augmentation_that_a_tokenizer_does_not_support_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"augment\.fim_rate = 0\.5: the tokenizer has no token <\|fim_prefix\|>"):
        Augmenter(ByteTokenizer(), AugmentConfig(fim_rate=0.5))
    with pytest.raises(ConfigError, match=r"augment\.subword_rate = 0\.5: a byte tokenizer has one way"):
        Augmenter(ByteTokenizer(), AugmentConfig(subword_rate=0.5))
    with pytest.raises(ValueError, match="synonyms is not set"):
        AugmentConfig(synonym_rate=0.5)


def test_nothing_is_changed_by_default() -> None:
    assert not AugmentConfig().is_on
    assert AugmentConfig(fim_rate=0.1).is_on
    tokenizer = tokenizer_of("bpe")
    assert isinstance(tokenizer, SentencePieceTokenizer)
    encoded, counts = Augmenter(tokenizer, AugmentConfig()).encode(SAMPLE, ["code"] * len(SAMPLE), range(len(SAMPLE)))
    assert np.array_equal(encoded.ids_T, tokenizer.encode_flat(SAMPLE).ids_T)
    assert not any(counts.values())
