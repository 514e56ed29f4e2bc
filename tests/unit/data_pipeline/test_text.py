from collections import Counter
from itertools import pairwise, permutations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from data_pipeline.text import TextBatch, find_repeats, mix_hashes, top_items, words_in_repeats

# Few characters of every sort that is treated in its own way, so that words and lines often repeat.
few_characters = st.sampled_from(
    "aAbZ09_'.,- \t\n\n éßЖα«»—…。、₂日本한กꀀ😀\u1000\u107f\u1080\u10d0\u1780\u17ff\u0e00\u0fff\u3040"
)
texts = st.lists(st.text(few_characters, max_size=40) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=6)


def is_separator(character: str) -> bool:
    code = ord(character)
    if code < 0x80:
        return not (character.isalnum() or character in "_'")
    return 0x80 <= code < 0xC0 or 0x2000 <= code < 0x2080 or 0x3000 <= code < 0x3040


def stands_alone(character: str) -> bool:
    code = ord(character)
    ranges = ((0x0E00, 0x1000), (0x1000, 0x1080), (0x1780, 0x1800), (0x3040, 0xE000))
    return any(first <= code < last for first, last in ranges)


def naive_words(text: str) -> list[str]:
    words = [""]
    for character in text:
        if is_separator(character):
            words.append("")
        elif stands_alone(character):
            words += [character, ""]
        else:
            words[-1] += character
    return [word for word in words if word]


def lower_ascii(word: str) -> str:
    return "".join(character.lower() if character.isascii() else character for character in word)


def batch_of(documents: list[str]) -> TextBatch:
    return TextBatch([text.encode() for text in documents])


def items(batch: TextBatch, starts: np.ndarray, ends: np.ndarray) -> list[str]:
    return [batch.bytes_N[start:end].tobytes().decode() for start, end in zip(starts, ends, strict=True)]


def split(values: list[str], borders: np.ndarray) -> list[list[str]]:
    return [values[first:last] for first, last in pairwise(borders)]


@given(texts)
@example([""])
@example(["one two", "", "日本 three"])
def test_words_are_those_that_a_reader_of_characters_finds(documents: list[str]) -> None:
    batch = batch_of(documents)
    words = items(batch, batch.word_starts_W, batch.word_ends_W)
    assert split(words, batch.words_D1) == [naive_words(text) for text in documents]
    inside = np.zeros(len(batch.bytes_N), np.bool_)
    for start, end in zip(batch.word_starts_W, batch.word_ends_W, strict=True):
        inside[start:end] = True
    assert np.array_equal(batch.is_word_N, inside)


@given(texts)
def test_lines_are_what_lies_between_newlines(documents: list[str]) -> None:
    batch = batch_of(documents)
    lines = items(batch, batch.line_starts_K, batch.line_ends_K)
    assert split(lines, batch.lines_D1) == [text.split("\n") for text in documents]


@given(texts)
def test_tokens_are_what_lies_between_ascii_white_space(documents: list[str]) -> None:
    batch = batch_of(documents)
    tokens = items(batch, *batch.tokens_T)
    assert tokens == [token.decode() for text in documents for token in text.encode().split()]


@given(texts)
def test_two_words_have_one_hash_exactly_if_they_are_the_same_but_for_case(documents: list[str]) -> None:
    batch = batch_of(documents)
    words = [lower_ascii(word) for word in items(batch, batch.word_starts_W, batch.word_ends_W)]
    assert (
        len(set(zip(words, batch.word_hashes_W.tolist(), strict=True))) == len(set(words)) == len(set(batch.word_hashes_W.tolist()))
    )


def test_a_hash_does_not_depend_on_the_block_that_a_word_falls_in() -> None:
    words = [f"word{number % 1000}" for number in range(30_000)]
    hashes = batch_of([" ".join(words)]).word_hashes_W
    assert len(hashes) == len(words)
    assert np.array_equal(hashes, np.tile(hashes[:1000], 30))
    assert len(set(hashes.tolist())) == 1000


def test_a_very_long_word_is_known_by_its_first_bytes() -> None:
    first, second, third = batch_of(["x" * 5000 + "a", "x" * 5000 + "b", "x" * 4000 + "b"]).word_hashes_W
    assert first == second != third


@given(texts)
def test_spans_of_bytes_are_equal_where_their_words_are_wherever_they_stand(documents: list[str]) -> None:
    batch = batch_of(documents)
    words = [tuple(map(lower_ascii, naive_words(line))) for text in documents for line in text.split("\n")]
    hashes = batch.hash_of_spans(batch.line_starts_K, batch.line_ends_K).tolist()
    assert len(set(zip(words, hashes, strict=True))) == len(set(words)) == len(set(hashes))
    assert all((hashed == 0) == (not line) for line, hashed in zip(words, hashes, strict=True))


def test_equal_lines_far_apart_have_one_hash() -> None:
    batch = batch_of(["\n".join(["the first line", "the second line"] * 10_000)])
    assert len(set(batch.hash_of_spans(batch.line_starts_K, batch.line_ends_K).tolist())) == 2


def test_the_order_of_words_counts() -> None:
    batch = batch_of(["one two three", "three two one"])
    first, second = batch.hash_of_words(batch.words_D1[:-1], batch.words_D1[1:])
    assert first != second


@given(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=6))
def test_every_order_of_the_same_words_has_its_own_hash(words: list[str]) -> None:
    orders = sorted(set(permutations(words)))
    batch = batch_of([" ".join(order) for order in orders])
    assert len(set(batch.hash_of_words(batch.words_D1[:-1], batch.words_D1[1:]).tolist())) == len(orders)


@given(texts, st.integers(1, 5))
def test_ngrams_are_the_runs_of_words_within_a_text(documents: list[str], n: int) -> None:
    ngrams = batch_of(documents).ngrams(n)
    expected, first = [], []
    place = 0
    for text in documents:
        words = list(map(lower_ascii, naive_words(text)))
        count = max(len(words) - n + 1, 0)
        expected += [tuple(words[start : start + n]) for start in range(count)]
        first += [place + start for start in range(count)]
        place += len(words)
    assert ngrams.first_words_G.tolist() == first
    assert len(ngrams.borders_D1) == len(documents) + 1
    assert np.diff(ngrams.borders_D1).tolist() == [max(len(naive_words(text)) - n + 1, 0) for text in documents]
    assert (
        len(set(zip(expected, ngrams.hashes_G.tolist(), strict=True))) == len(set(expected)) == len(set(ngrams.hashes_G.tolist()))
    )


@given(texts)
def test_characters_are_counted_not_bytes(documents: list[str]) -> None:
    batch = batch_of(documents)
    assert batch.count_characters(batch.starts_D, batch.ends_D).tolist() == [len(text) for text in documents]


@given(st.lists(st.integers(0, 2**64 - 1), unique=True))
def test_mixing_keeps_different_hashes_apart(values: list[int]) -> None:
    assert len(set(mix_hashes(np.array(values, np.uint64)).tolist())) == len(values)


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
