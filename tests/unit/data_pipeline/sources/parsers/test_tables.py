import contextlib
import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import LimitConfig, PrepareConfig, RecordConfig
from data_pipeline.documents import Document, Rejection
from data_pipeline.sources.parsers.source_format import Content, Origin
from data_pipeline.sources.parsers.tables import CSV, TSV, read_rows
from data_pipeline.sources.streams import Budget

ORIGIN = Origin("a.csv")


def read(
    data: bytes, separator: str = ",", block_bytes: int = 1 << 18, max_bytes: int = 1 << 20, **records: object
) -> list[Document | Rejection]:
    blocks = (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    config = PrepareConfig(
        sources=("builtin",), limits=LimitConfig(max_line_bytes=max_bytes), records=RecordConfig.model_validate(records)
    )
    content = Content(ORIGIN, config, blocks, Budget(config.limits, lambda: 0))
    return list({",": CSV, "\t": TSV}[separator].read(content))


def outcomes(items: list[Document | Rejection]) -> list[str]:
    return [item.text if isinstance(item, Document) else f"<{item.reason}>" for item in items]


fields = st.text(st.sampled_from('ab ,\t"\n\ré\0'), max_size=12)


@given(
    rows=st.lists(st.tuples(fields, fields), max_size=8),
    separator=st.sampled_from(",\t"),
    line_end=st.sampled_from(["\n", "\r\n"]),
    block_bytes=st.integers(1, 40),
)
def test_what_a_table_was_written_from_comes_back(
    rows: list[tuple[str, str]], separator: str, line_end: str, block_bytes: int
) -> None:
    table = io.StringIO()
    csv.writer(table, delimiter=separator, lineterminator=line_end, quoting=csv.QUOTE_ALL).writerows([("id", "text"), *rows])
    items = read(b"\xef\xbb\xbf" + table.getvalue().encode(), separator, block_bytes, metadata=["id"])
    assert outcomes(items) == [text for _, text in rows]


TABLES: dict[str, tuple[bytes, list[str]]] = {
    "nothing": (b"", []),
    "only column names": (b"id,text\n", []),
    "no newline at the end": (b"text\nlast", ["last"]),
    "quoted newlines": (b'text,n\n"one\n\ntwo",1\n', ["one\n\ntwo"]),
    "CRLF": (b'text,n\r\n"a\r\nb",1\r\nc,2\r\n', ["a\r\nb", "c"]),
    "doubled quotes": (b'text\n"say ""so"""\n', ['say "so"']),
    "NUL": (b"text\na\0b\n", ["a\0b"]),
    "empty line": (b"text\n\nb\n", ["<empty>", "b"]),
    "empty field": (b"text,n\n,1\n", [""]),
    "too few fields": (b"id,text\n1\n2,b\n", ["<field-count>", "b"]),
    "too many fields": (b"id,text\n1,a,x\n2,b\n", ["<field-count>", "b"]),
    "no such column": (b"id,body\n1,a\n2,b\n", ["<no-text-field>", "<no-text-field>"]),
    "column named twice": (b"text,text\na,b\n", ["<duplicate-key>"]),
    "quote in the middle": (b'text\n"a"b\nc\n', ["<not-csv>", "c"]),
    "carriage return in the middle": (b"text\na\rb\nc\n", ["<not-csv>", "c"]),
    "quote that never ends": (b'text\na\n"b\nc\nd', ["a", "<not-csv>", "c", "d"]),
    "quote that ends in the next line": (b'text\na\n"b\nc"\nd', ["a", "b\nc", "d"]),
    "quote inside a field": (b'text,n\n5" disk,1\nb,2\n', ['5" disk', "b"]),
    "column names that cannot be read": (b'"id"x,text\n1,a\nid,text\n2,b\n', ["<not-csv>", *["<no-text-field>"] * 3]),
    "invalid UTF-8 in the text": (b"text\ncaf\xe9\nb\n", ["<invalid-utf8>", "b"]),
    "invalid UTF-8 in another field": (b"id,text\n\xe9,a\n", ["a"]),
    "surrogate in the text": (b"text\n\xed\xa0\x80\n", ["<invalid-utf8>"]),
    "UTF-16": ("text\na\n".encode("utf-16"), ["<no-text-field>"] * 2),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_row_becomes_its_text_or_a_rejection_with_its_reason(name: str) -> None:
    data, expected = TABLES[name]
    assert outcomes(read(data)) == expected


def test_a_rejection_says_where_and_what_is_missing() -> None:
    [item] = read(b'id,body\n1,"a\nb"\n')
    assert isinstance(item, Rejection)
    assert (item.line, item.sample) == (2, '1,"a\nb"')
    assert item.detail.startswith("no column 'text'; the columns are 'id', 'body'; see records.text_field;")


def test_a_row_is_known_by_its_first_line_and_byte() -> None:
    items = read(b'text,n\n"a\nb",1\nc,2\n')
    assert [(item.line, item.offset) for item in items if isinstance(item, Document)] == [(2, 7), (4, 15)]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 18])
def test_a_row_over_the_limit_is_rejected_and_the_next_one_is_read(block_bytes: int) -> None:
    data = b"text\n" + b"x" * 100 + b'\nmiddle\n"' + b"y" * 80 + b'"\nlast\n' + b"z" * 100
    items = read(data, max_bytes=64, block_bytes=block_bytes)
    assert outcomes(items) == ["<line-too-long>", "middle", "<line-too-long>", "last", "<line-too-long>"]
    assert [item.line for item in items] == [2, 3, 4, 5, 6]
    assert outcomes(read(b"text\n" + b"x" * 64 + b"\n", max_bytes=64, block_bytes=block_bytes)) == ["x" * 64]


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 1 << 18])
def test_a_quote_that_is_not_closed_within_the_limit_costs_one_line(block_bytes: int) -> None:
    items = read(b'text\na\n"b\n' + b"c\n" * 50, max_bytes=64, block_bytes=block_bytes)
    assert outcomes(items) == ["a", "<not-csv>", *["c"] * 50]
    assert isinstance(items[1], Rejection)
    assert "a quote is not closed within limits.max_line_bytes; see records.quotes" in items[1].detail


@given(st.lists(st.text(st.sampled_from('a,"\n'), max_size=9), max_size=12).map("\n".join), st.integers(1, 30), st.integers(64, 80))
def test_rows_are_where_python_sees_them_and_no_byte_is_lost(text: str, block_bytes: int, max_bytes: int) -> None:
    data = text.encode()
    blocks = (data[start : start + block_bytes] for start in range(0, len(data), block_bytes))
    rows = list(read_rows(blocks, ",", max_bytes))
    assert b"".join(row.data + b"\n" for row in rows).removesuffix(b"\n") == data.removesuffix(b"\n") or any(
        row.too_long for row in rows
    )
    assert all(data[row.offset : row.offset + len(row.data)] == row.data for row in rows)
    assert [row.number for row in rows] == [1 + data.count(b"\n", 0, row.offset) for row in rows]
    with contextlib.suppress(csv.Error):
        expected = list(csv.reader(io.StringIO(text, newline=""), strict=True))
        if max((len(row) for row in text.split("\n")), default=0) <= 64 and len(data) <= 64:
            assert [next(csv.reader([row.data.decode()])) for row in rows] == expected


def test_quotes_can_be_part_of_the_text() -> None:
    assert outcomes(read(b'text\tn\n"a\t1\n5" b\t2\n', "\t", quotes=False)) == ['"a', '5" b']


def test_other_columns_can_come_along() -> None:
    [item] = read(b"id,text,note\n1,a,caf\xe9\n", metadata=["note", "id", "text"])
    assert isinstance(item, Document)
    assert item.metadata == r'{"id":"1","note":"caf\udce9","text":"a"}'


@given(st.binary(max_size=200), st.integers(1, 50), st.sampled_from(",\t"), st.booleans())
def test_no_table_raises(data: bytes, block_bytes: int, separator: str, quotes: bool) -> None:
    for item in read(b"text,n\n" + data, separator, block_bytes, max_bytes=64, quotes=quotes, metadata=["n"]):
        if isinstance(item, Document):
            item.text.encode()
            item.metadata.encode()


def test_a_prompt_is_a_column_before_the_text() -> None:
    first, second, third = read(b'q,text\nWhy?,"So, so."\n,Alone\n\xff,So\n', prompt_field="q")
    assert isinstance(first, Document)
    assert isinstance(second, Document)
    assert (first.text, first.parts) == ("Why?\nSo, so.", (5, 7))
    assert (second.text, second.parts) == ("Alone", ())
    assert outcomes([third]) == ["<invalid-utf8>"]
    assert outcomes(read(b"text\nSo.\n", prompt_field="q")) == ["<no-text-field>"]
