import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SourceError
from data_pipeline.dedup.benchmarks import index_items, load_benchmarks, read_items
from data_pipeline.text import TextBatch
from tests.support.duplicates import shingles_of

words = st.lists(st.sampled_from("abc"), max_size=40).map(" ".join)


def batch_of(*texts: str) -> TextBatch:
    return TextBatch([text.encode() for text in texts])


def overlap_naively(text: str, item: str, num_words: int) -> bool:
    item_words = item.split()
    length = num_words if len(item_words) >= num_words else len(item_words)
    if length < min(8, num_words):
        return False
    padded = f" {text} "
    return any(f" {' '.join(item_words[first : first + length])} " in padded for first in range(len(item_words) - length + 1))


@given(st.lists(words, max_size=4), st.lists(st.lists(words, max_size=3), max_size=5), st.sampled_from([4, 8, 13]))
def test_overlaps_are_those_of_a_search_for_the_words(texts: list[str], items: list[list[str]], num_words: int) -> None:
    index = index_items(items, num_words)
    overlaps = index.overlaps(batch_of(*texts))
    expected = {
        (document, item)
        for document, text in enumerate(texts)
        for item, parts in enumerate(items)
        if any(overlap_naively(text, part, num_words) for part in parts)
    }
    assert set(overlaps) == expected
    assert np.flatnonzero(index.count(batch_of(*texts))).tolist() == sorted({document for document, _ in expected})


def test_every_shared_run_counts_whatever_its_case_and_punctuation() -> None:
    item = " ".join(f"w{number}" for number in range(20))
    index = index_items([[item]], 13)
    texts = (f"before, {item.upper().replace(' ', ', ')}; after", item.replace("w10", "other"), item.rsplit(" ", 7)[0])
    assert index.count(batch_of(*texts)).tolist() == [8, 0, 1]
    assert len(shingles_of(item, 13)) == 8


def test_items_below_eight_words_match_nothing() -> None:
    index = index_items([["one two three four five six seven"], [""], []], 13)
    assert index.count(batch_of("one two three four five six seven eight")).tolist() == [0]
    assert index.num_items == 3


def test_a_million_random_words_do_not_match_by_chance() -> None:
    numbers = np.random.default_rng(0).integers(0, 1000, 1_000_000).astype(str)
    index = index_items([[" ".join(numbers[:500_000])]], 13)
    assert index.count(batch_of(" ".join(numbers[500_000:]))).tolist() == [0]


def test_all_strings_of_a_json_line_make_one_item(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_text(
        json.dumps({"q": "a", "choices": ["b", {"text": "c"}], "answer": 1, "id": None}) + "\n\n" + json.dumps("d") + "\n"
    )
    assert list(read_items(path)) == [["a", "b", "c"], ["d"]]


def test_paragraphs_of_a_text_file_are_items(tmp_path: Path) -> None:
    path = tmp_path / "quiz.txt"
    path.write_text("one\nparagraph\n\n\nanother\n")
    assert [text.strip() for [text] in read_items(path)] == ["one\nparagraph", "another"]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("blank", ["", " ", "\t \u3000"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_blank_lines_separate_the_items_with_any_line_ending(tmp_path: Path, newline: str, blank: str, mark: str) -> None:
    path = tmp_path / "quiz.txt"
    path.write_bytes((mark + newline.join(["one", "paragraph", blank, blank, "another", blank, "", ""])).encode())
    assert [text.strip() for [text] in read_items(path)] == ["one\nparagraph", "another"]


def test_json_lines_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "quiz.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a"}\r\n"b"\r\n')
    assert list(read_items(path)) == [["a"], ["b"]]


def test_a_long_text_of_blanks_is_split_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "quiz.txt"
    path.write_text(f"one{' ' * 1_000_000}{chr(10) * 1_000_000}{' ' * 1_000_000}two\n")
    assert [text.strip() for [text] in read_items(path)] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("quiz.jsonl", b'{"a": 1}\n{"a"\n', "quiz.jsonl:2: not valid JSON"),
        ("quiz.jsonl", b'{"a": "\xff"}\n', "quiz.jsonl:1: not valid JSON"),
        ("quiz.jsonl", b"[" * 100_000, "quiz.jsonl:1: not valid JSON"),
        ("quiz.txt", b"caf\xe9", "quiz.txt: not UTF-8"),
        ("quiz.csv", b"a,b", "unsupported format; benchmarks are read from .jsonl and .txt files"),
        ("quiz.jsonl", None, "no such benchmark file; correct the path"),
    ],
)
def test_a_bad_benchmark_file_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SourceError, match=re.escape(message)):
        load_benchmarks((path,), 13)
