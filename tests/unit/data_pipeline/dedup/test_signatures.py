import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_pipeline.config import DedupConfig
from data_pipeline.dedup.keys import Bands, choose_bands, shingle, sign, text_digest
from data_pipeline.dedup.pairs import jaccard
from data_pipeline.text import TextBatch
from tests.support.duplicates import shingles_of

SETTINGS = DedupConfig()

ascii_texts = st.lists(st.text("abAB .,'_\n1", max_size=60), min_size=1, max_size=12)
word_sets = st.sets(st.integers(0, 40), min_size=1, max_size=40)


def keys_of(texts: list[str], settings: DedupConfig = SETTINGS, indices: list[int] | None = None):
    chosen = range(len(texts)) if indices is None else indices
    return sign(TextBatch([text.encode() for text in texts]), list(chosen), settings)


def test_an_exact_duplicate_differs_in_white_space_alone() -> None:
    assert text_digest(b"tabs\tand\r\nlines ") == text_digest(b"tabs and lines")
    for one, other in (("Hello", "hello"), ("a b", "ab"), ("-15", "15"), ("C++", "C#"), (":)", ":("), ("a\u00a0b", "a b")):
        assert text_digest(one.encode()) != text_digest(other.encode())


def test_texts_with_different_labels_have_no_common_key() -> None:
    batch = TextBatch([b"good or bad, who can tell at all?"] * 3)
    keys = sign(batch, range(3), DedupConfig(), ["good", "bad", "good"])
    assert keys.digests_D[0] == keys.digests_D[2] != keys.digests_D[1]
    assert (keys.bands_DB[0] == keys.bands_DB[2]).all()
    assert not np.intersect1d(keys.bands_DB[0], keys.bands_DB[1]).size


@given(ascii_texts, st.integers(1, 6))
def test_a_text_has_as_many_distinct_shingles_as_it_has_distinct_runs_of_words(texts: list[str], num_words: int) -> None:
    shingles = shingle(TextBatch([text.encode() for text in texts]), num_words)
    assert [len(shingles.of(place)) for place in range(len(texts))] == [len(shingles_of(text, num_words)) for text in texts]


@given(word_sets, word_sets)
def test_similarity_is_the_share_of_common_members(one: set[int], other: set[int]) -> None:
    found = jaccard(np.array(sorted(one), np.uint64), np.array(sorted(other), np.uint64))
    assert found == len(one & other) / len(one | other)


def test_texts_with_the_same_words_have_the_same_bands_and_others_share_none() -> None:
    words = [f"word{number}" for number in range(200)]
    keys = keys_of([" ".join(words), ", ".join(words).upper(), " ".join(reversed(words))])
    assert (keys.bands_DB[0] == keys.bands_DB[1]).all()
    assert not np.isin(keys.bands_DB[2], keys.bands_DB[0]).any()


def test_similar_texts_share_bands_as_often_as_the_formula_says() -> None:
    bands = choose_bands(SETTINGS)
    generator = np.random.default_rng(0)
    texts, expected = [], []
    for _ in range(300):
        words = generator.integers(0, 1 << 40, 300).astype(str)
        edited = words.copy()
        edited[generator.choice(300, 8, replace=False)] = "changed"
        texts += [" ".join(words), " ".join(edited)]
        one, other = (shingles_of(text, SETTINGS.shingle_words) for text in texts[-2:])
        expected.append(bands.num_bands * (len(one & other) / len(one | other)) ** bands.num_rows)
    keys = keys_of(texts)
    shared = (keys.bands_DB[::2] == keys.bands_DB[1::2]).sum(1)
    assert shared.mean() == pytest.approx(np.mean(expected), rel=0.05)


def test_keys_do_not_depend_on_the_other_texts_of_the_batch() -> None:
    texts = ["one two three four five six seven", "", "a b", "!!!", "x " * 50]
    together = keys_of(texts)
    for place, text in enumerate(texts):
        alone, chosen = keys_of([text]), keys_of(texts, indices=[place])
        for keys, row in ((alone, 0), (chosen, 0)):
            assert keys.digests_D[row] == together.digests_D[place]
            assert keys.has_words_D[row] == together.has_words_D[place]
            assert not keys.has_words_D[row] or (keys.bands_DB[row] == together.bands_DB[place]).all()
    assert together.has_words_D.tolist() == [True, False, True, False, True]


def test_the_keys_of_a_text_do_not_change_between_versions() -> None:
    """If a new version of the hashing library changes the keys, other duplicates are found: increase PIPELINE_VERSION."""
    keys = keys_of(["The quick brown fox jumps over the lazy dog, and runs away."])
    assert keys.digests_D[0].tobytes().hex() == "cd423a057136c8799deead857dbd249f"
    assert [f"{key:016x}" for key in keys.bands_DB[0, :3].tolist()] == ["2b99c8384903d35f", "7ce6c80f62e1ab07", "76899f48861b7f00"]


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold_and_fit_the_signature(threshold: float) -> None:
    bands = choose_bands(DedupConfig(threshold=threshold))
    assert bands.num_bands * bands.num_rows <= 128
    assert bands.probability(threshold) >= 0.99
    longer = Bands(128 // (bands.num_rows + 1), bands.num_rows + 1)
    assert longer.probability(threshold) < 0.99 or bands.num_rows == 128


def test_without_near_duplicates_there_are_no_bands() -> None:
    assert keys_of(["one two three"], DedupConfig(near=False)).bands_DB.shape == (1, 0)


def test_near_duplicates_without_exact_ones_are_refused() -> None:
    with pytest.raises(ValidationError, match=re.escape("set near to false too, or exact to true")):
        DedupConfig(exact=False)


def test_more_hashes_compare_fewer_dissimilar_pairs_and_still_find_those_at_the_threshold() -> None:
    few, many = (choose_bands(DedupConfig(num_hashes=number)) for number in (32, 512))
    assert few.num_bands * few.num_rows <= 32
    assert many.num_bands * many.num_rows <= 512
    assert many.probability(0.4) < few.probability(0.4) / 2
    assert min(few.probability(0.8), many.probability(0.8)) > 0.9


def test_texts_of_the_same_words_in_another_order_are_alike_in_single_words_only() -> None:
    text = " ".join(f"w{number}" for number in range(40))
    turned = " ".join(reversed(text.split()))
    for num_words, shared in ((1, True), (5, False)):
        keys = keys_of([text, turned], DedupConfig(shingle_words=num_words))
        assert bool(np.any(keys.bands_DB[0] == keys.bands_DB[1])) is shared
