import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers.source_format import Origin, decode, metadata_json

ORIGIN = Origin("a.txt", "code", "html")


@given(st.text(st.characters(exclude_categories=["Cs"])).map(str.encode), st.integers(1, 9))
def test_valid_text_comes_out_as_it_went_in(data: bytes, offset: int) -> None:
    item = decode(data, ORIGIN, 1, offset)
    assert isinstance(item, Document)
    assert item.text.encode() == data
    assert (item.path, item.kind, item.markup) == ("a.txt", "code", "html")


VALID = {
    "NUL": "a\0b",
    "mixed newlines": "a\r\nb\rc\nd\u2028e\u0085f",
    "direction marks": "a\u202eb\u2066c\u200f",
    "byte order mark inside": "a\ufeffb",
    "private and unassigned": "\ue000\U000e0fff\U0010ffff\ufdd0",
    "not normalised": "e\u0301 é ﬁ",
    "control characters": "\x01\x1b[2J\x7f\x9f",
}


@pytest.mark.parametrize("name", VALID)
def test_strange_but_valid_text_is_left_to_cleaning(name: str) -> None:
    item = decode(b"\xef\xbb\xbf" + VALID[name].encode(), ORIGIN, 1, 0)
    assert isinstance(item, Document)
    assert item.text == VALID[name]


INVALID = {
    "Latin-1": (b"one\ncaf\xe9 au lait", 2, "byte 0xe9 is not UTF-8 (invalid continuation byte); convert the file to UTF-8"),
    "cut in a character": ("é".encode()[:1], 1, "byte 0xc3 is not UTF-8 (unexpected end of data)"),
    "overlong": (b"\xc0\xaf", 1, "byte 0xc0 is not UTF-8 (invalid start byte)"),
    "overlong NUL": (b"a\xc0\x80", 1, "byte 0xc0"),
    "overlong in three bytes": (b"\xe0\x80\xaf", 1, "byte 0xe0"),
    "surrogate": (b"\n\n\xed\xa0\x80", 3, "byte 0xed"),
    "surrogate pair (CESU-8)": (b"\xed\xa0\xbd\xed\xb8\x80", 1, "byte 0xed"),
    "beyond Unicode": (b"\xf4\x90\x80\x80", 1, "byte 0xf4"),
    "UTF-16": ("words".encode("utf-16"), 1, "this is UTF-16; convert it to UTF-8"),
    "UTF-16, big end first": (b"\xfe\xff\0w", 1, "this is UTF-16; convert it to UTF-8"),
    "UTF-32": ("words".encode("utf-32"), 1, "this is UTF-32; convert it to UTF-8"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_utf8_is_rejected_whole_with_its_line_and_byte(name: str) -> None:
    data, line, detail = INVALID[name]
    item = decode(data, ORIGIN, 1, 0)
    assert isinstance(item, Rejection)
    assert (item.reason, item.line) == (Reason.INVALID_UTF8, line)
    assert item.detail.startswith(detail)


def test_metadata_is_one_compact_object_of_strings_and_finite_numbers() -> None:
    fields = {"b": "é", "a": 1, "inf": float("inf"), "list": [1], "none": None, "t": True, "x": 0.5, "long": "x" * 65537}
    assert metadata_json(fields, fields) == '{"a":1,"b":"é","t":true,"x":0.5}'
    assert metadata_json(fields, ["none", "missing"]) == ""


@given(st.dictionaries(st.text(), st.text()))
def test_metadata_can_always_be_written_as_utf8(fields: dict[str, str]) -> None:
    text = metadata_json(fields, fields)
    assert json.loads(text.encode() or b"{}") == fields
