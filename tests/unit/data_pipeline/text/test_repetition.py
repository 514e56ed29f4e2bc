from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.text.batch import TextBatch
from data_pipeline.text.ngrams import mix_hashes
from data_pipeline.text.repetition import find_repeats, top_items, words_in_repeats

few_items = st.lists(st.lists(st.integers(0, 5), max_size=12), max_size=5)
some_words = st.lists(st.lists(st.sampled_from("abc"), max_size=20).map(" ".join), min_size=1, max_size=4)


def laid_out(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    values = np.array([value for items in documents for value in items], np.uint64)
    return mix_hashes(values), np.concatenate([[0], np.cumsum([len(items) for items in documents])]).astype(np.int64)


@given(few_items)
def test_a_repeat_equals_an_earlier_item_of_its_own_text(documents: list[list[int]]) -> None:
    hashes, borders = laid_out(documents)
    expected = [
        borders[number] + place
        for number, items in enumerate(documents)
        for place in range(len(items))
        if items[place] in items[:place]
    ]
    assert find_repeats(hashes, borders).tolist() == expected


@given(few_items)
def test_the_top_item_is_the_commonest_and_among_those_the_first(documents: list[list[int]]) -> None:
    hashes, borders = laid_out(documents)
    top = top_items(hashes, borders)
    for number, items in enumerate(documents):
        value, count = Counter(items).most_common(1)[0] if items else (0, 0)
        if count > 1:
            assert (top.counts_D[number], top.first_D[number]) == (count, borders[number] + items.index(value))
        else:
            assert (top.counts_D[number], top.first_D[number]) == (0, 0)


def test_nothing_is_lost_among_many_items() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 1 << 62, 200_000).astype(np.uint64)
    values[100_000:] = values[generator.permutation(100_000)]
    assert find_repeats(values, np.array([0, 200_000])).tolist() == list(range(100_000, 200_000))
    assert not len(find_repeats(values, np.array([0, 100_000, 200_000])))


@given(some_words, st.integers(1, 4))
def test_the_words_of_repeats_are_their_union(documents: list[str], n: int) -> None:
    batch = TextBatch([text.encode() for text in documents])
    expected = []
    for text in documents:
        words = text.split()
        grams = [tuple(words[place : place + n]) for place in range(len(words) - n + 1)]
        repeated = {place + distance for place in range(len(grams)) if grams[place] in grams[:place] for distance in range(n)}
        expected += [place in repeated for place in range(len(words))]
    assert words_in_repeats(batch.ngrams(n), len(batch.word_hashes_W)).tolist() == expected
