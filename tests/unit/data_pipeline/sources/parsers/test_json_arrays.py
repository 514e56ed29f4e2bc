from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import Reason
from data_pipeline.sources.parsers.json_arrays import _elements, is_array
from data_pipeline.sources.streams import StreamError

objects = st.recursive(
    st.dictionaries(st.text(max_size=5), st.none() | st.booleans() | st.integers() | st.text(max_size=20), max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=4), inner | st.lists(inner, max_size=3), max_size=3),
    max_leaves=8,
)


def blocks(data: bytes, size: int) -> Iterator[bytes]:
    return (data[start : start + size] for start in range(0, len(data), size))


def elements(data: bytes, size: int = 7, max_bytes: int = 1 << 20) -> list[bytes]:
    return [line.data for line in _elements(blocks(data, size), max_bytes)]


@given(st.lists(objects, max_size=6), st.integers(1, 40), st.sampled_from([None, 0, 2]))
def test_each_object_is_an_element_whatever_the_blocks(values: list[object], size: int, indent: int | None) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=False).encode() + b"\n"
    assert [json.loads(one) for one in elements(data, size)] == values


@pytest.mark.parametrize("size", [1, 3, 100])
def test_what_is_no_object_is_an_element_of_its_own(size: int) -> None:
    assert elements(b'[{"a": 1}, null, 3, {"b": 2}]', size) == [b'{"a": 1}', b"null, 3", b'{"b": 2}']


@pytest.mark.parametrize(
    "data",
    [b'[{"a": 1}', b'[{"a": "x', b'[{"a": 1}]\n[{"a": 2}]', b'[{"a": 1}, {"b": 2}] more', b'[{"a": 1}}', b'[{"a": "\\'],
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_array_that_ends_too_early_or_too_late_is_told(data: bytes, size: int) -> None:
    with pytest.raises(StreamError) as error:
        elements(data, size)
    assert error.value.reason is Reason.NOT_JSON


def test_an_element_that_is_too_long_ends_the_file() -> None:
    with pytest.raises(StreamError, match="longer than limits"):
        elements(b'[{"a": "' + b"x" * 500 + b'"}]', size=16, max_bytes=64)


@pytest.mark.parametrize(
    ("first", "expected"), [(b'[{"a"', True), (b"\xef\xbb\xbf [\n {", True), (b"[1, 2]", False), (b"{", False)]
)
def test_the_beginning_tells_an_array_of_objects(first: bytes, expected: bool) -> None:
    assert is_array(first) is expected
