import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.config import PrepareConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.errors import SourceError
from data_pipeline.partitions import cut_into_partitions
from data_pipeline.sources.inputs import InputFile, Part, find_inputs
from data_pipeline.sources.readers import parse_json_line, read_part
from data_pipeline.sources.streams import Line

GOOD = b'{"text": "a good line"}'
DEEP = b'{"text": "x", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

LINES: dict[str, tuple[bytes, str | Reason]] = {
    "plain": (GOOD, "a good line"),
    "other fields": (b'{"id": 1, "text": "t", "meta": {"a": [null, true, 1.5e3]}}', "t"),
    "white space around": (b'  {"text": "t"}  ', "t"),
    "carriage return": (b'{"text": "t"}\r', "t"),
    "escapes": (rb'{"text": "\u00e9\n\"\\ \ud83d\ude00"}', 'é\n"\\ 😀'),
    "raw unicode": ('{"text": "é 😀"}'.encode(), "é 😀"),
    "escaped NUL": (rb'{"text": "a\u0000b"}', "a\0b"),
    "empty text": (b'{"text": ""}', ""),
    "duplicate in another object": (b'{"text": "t", "a": {"text": 1}}', "t"),
    "integer of 4000 digits": (b'{"text": "t", "n": ' + b"9" * 4000 + b"}", "t"),
    "empty": (b"", Reason.EMPTY),
    "only white space": (b" \t\r", Reason.EMPTY),
    "no JSON": (b"plain text", Reason.NOT_JSON),
    "cut short": (b'{"text": "abc', Reason.NOT_JSON),
    "two values": (GOOD + GOOD, Reason.NOT_JSON),
    "trailing comma": (b'{"text": "t",}', Reason.NOT_JSON),
    "single quotes": (b"{'text': 't'}", Reason.NOT_JSON),
    "comment": (b'{"text": "t"} // why', Reason.NOT_JSON),
    "NaN": (b'{"text": "t", "score": NaN}', Reason.NOT_JSON),
    "infinity": (b'{"text": "t", "score": -Infinity}', Reason.NOT_JSON),
    "raw NUL": (b'{"text": "a\0b"}', Reason.NOT_JSON),
    "raw tab": (b'{"text": "a\tb"}', Reason.NOT_JSON),
    "bad escape": (rb'{"text": "\x41"}', Reason.NOT_JSON),
    "integer of 5000 digits": (b'{"text": "t", "n": ' + b"9" * 5000 + b"}", Reason.NOT_JSON),
    "byte order mark in the middle of the file": (b"\xef\xbb\xbf" + GOOD, Reason.NOT_JSON),
    "nested 100,000 deep": (DEEP, Reason.TOO_DEEP),
    "array": (b'["text"]', Reason.NOT_AN_OBJECT),
    "string": (b'"text"', Reason.NOT_AN_OBJECT),
    "number": (b"12", Reason.NOT_AN_OBJECT),
    "null": (b"null", Reason.NOT_AN_OBJECT),
    "text twice": (b'{"text": "a", "text": "b"}', Reason.DUPLICATE_KEY),
    "text twice, once escaped": (rb'{"text": "a", "t\u0065xt": "b"}', Reason.DUPLICATE_KEY),
    "other field twice": (b'{"text": "a", "n": 1, "n": 2}', Reason.DUPLICATE_KEY),
    "no text": (b'{"content": "t"}', Reason.NO_TEXT_FIELD),
    "empty object": (b"{}", Reason.NO_TEXT_FIELD),
    "other case": (b'{"Text": "t"}', Reason.NO_TEXT_FIELD),
    "text is a number": (b'{"text": 12}', Reason.TEXT_NOT_A_STRING),
    "text is null": (b'{"text": null}', Reason.TEXT_NOT_A_STRING),
    "text is a list": (b'{"text": ["a"]}', Reason.TEXT_NOT_A_STRING),
    "Latin-1": (b'{"text": "caf\xe9"}', Reason.INVALID_UTF8),
    "overlong": (b'{"text": "\xc0\xaf"}', Reason.INVALID_UTF8),
    "UTF-8 surrogate": (b'{"text": "\xed\xa0\x80"}', Reason.INVALID_UTF8),
    "UTF-16": ('{"text": "t"}'.encode("utf-16"), Reason.INVALID_UTF8),
    "high surrogate alone": (rb'{"text": "\ud800"}', Reason.LONE_SURROGATE),
    "low surrogate first": (rb'{"text": "\udc00\ud800"}', Reason.LONE_SURROGATE),
}


def outcome(item: Document | Rejection) -> str | Reason:
    return item.text if isinstance(item, Document) else item.reason


@pytest.mark.parametrize("name", LINES)
def test_a_line_becomes_its_text_or_a_rejection_with_its_reason(name: str) -> None:
    data, expected = LINES[name]
    item = parse_json_line(Line(7, 100, data), "file.jsonl", "text")
    assert outcome(item) == expected
    assert (item.path, item.line) == ("file.jsonl", 7)


@given(
    st.one_of(
        st.binary(max_size=80),
        st.sampled_from([data for data, _ in LINES.values() if len(data) < 200]).flatmap(
            lambda data: st.tuples(st.integers(0, len(data)), st.integers(0, len(data)), st.binary(max_size=3)).map(
                lambda cut: data[: cut[0]] + cut[2] + data[cut[1] :]
            )
        ),
    )
)
def test_no_line_raises(data: bytes) -> None:
    item = parse_json_line(Line(1, 0, data), "file.jsonl", "text")
    if isinstance(item, Document):
        item.text.encode()


def test_a_rejection_shows_the_line_and_says_what_is_there() -> None:
    item = parse_json_line(Line(1, 9, b'{"body": "\xe2\x82\xac", "title": "t"}'), "f", "text")
    assert isinstance(item, Rejection)
    assert item.sample == '{"body": "€", "title": "t"}'
    assert item.detail == "no field 'text'; there are 'body', 'title'; see jsonl.text_field"


def files_in(folder: Path, **settings: Any) -> tuple[tuple[InputFile, ...], PrepareConfig]:
    config = PrepareConfig(sources=(str(folder),), **settings)
    return find_inputs(config, folder / "digests.json"), config


def read_all(folder: Path, **settings: Any) -> list[Document | Rejection]:
    inputs, config = files_in(folder, **settings)
    return [
        item
        for partition in cut_into_partitions(inputs, config.partition_bytes)
        for part in partition.parts
        for item in read_part(part, config)
    ]


def texts(items: list[Document | Rejection]) -> list[str]:
    return [item.text for item in items if isinstance(item, Document)]


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    assert texts(read_all(tmp_path)) == ["one\n\ntwo\n"]


def test_paragraphs_are_what_stands_between_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_bytes(b"\n \n# one\nmore\n\n\t\r\ntwo\r\n\nthree")
    items = read_all(tmp_path, text={"documents": "paragraphs"})
    assert texts(items) == ["# one\nmore", "two\r", "three"]
    assert [(item.line, item.offset) for item in items if isinstance(item, Document)] == [(3, 3), (7, 18), (9, 24)]


@given(lengths=st.lists(st.integers(0, 150), min_size=1, max_size=12))
def test_chunks_end_at_the_first_line_end_after_their_length(lengths: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    text = "".join("é" * length + "\n" for length in lengths)
    (folder / "a.txt").write_text(text)
    chunks = texts(read_all(folder, text={"documents": "chunks", "chunk_chars": 64}))
    assert "\n".join(chunks) == text.removesuffix("\n")
    assert all(len(chunk) + 1 >= 64 > len(chunk[: chunk.rfind("\n") + 1]) for chunk in chunks[:-1])


def test_no_chunk_reaches_across_the_border_of_a_split_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {n:03d}\n" for n in range(100)))
    items = read_all(tmp_path, text={"documents": "chunks"}, split={"by": "tail", "val_fraction": 0.1})
    assert [item.offset for item in items if isinstance(item, Document)] == [0, 810]


def test_invalid_utf8_in_a_text_file_is_rejected_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\ncaf\xe9\n")
    [item] = read_all(tmp_path)
    assert isinstance(item, Rejection)
    assert (item.reason, item.line) == (Reason.INVALID_UTF8, 3)
    assert "byte 0xe9 is no UTF-8" in item.detail


def test_utf16_text_is_rejected_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("some words".encode("utf-16"))
    [item] = read_all(tmp_path)
    assert isinstance(item, Rejection)
    assert "UTF-16" in item.detail


def test_a_file_too_large_for_one_document_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    [item] = read_all(tmp_path, limits={"max_document_bytes": 64})
    assert isinstance(item, Rejection)
    assert item.reason == Reason.FILE_TOO_LARGE
    assert "set text.documents to chunks" in item.detail


def test_what_a_damaged_archive_gives_before_its_damage_is_kept(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "line %d"}\n' % n for n in range(200_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    items = read_all(tmp_path)
    assert outcome(items[-1]) == Reason.CORRUPT_COMPRESSION
    assert 1000 < len(texts(items)) < 200_000
    assert texts(items)[:2] == ["line 0", "line 1"]


@given(contents=st.lists(st.text("xyz é", max_size=40), min_size=1, max_size=30), partition_bytes=st.integers(1024, 1100))
def test_cutting_a_file_into_partitions_loses_and_repeats_no_line(
    contents: list[str], partition_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    contents = [f"{content}{n}" for n, content in enumerate(contents * 8)]
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{content}"}}\n' for content in contents))
    assert texts(read_all(folder, partition_bytes=partition_bytes)) == contents


def test_a_file_that_changed_since_it_was_found_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    [file], config = files_in(tmp_path)
    path.write_text("after!")
    with pytest.raises(SourceError, match=r"a\.txt changed while it was being prepared"):
        list(read_part(Part(file, 0, file.bytes), config))
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.txt disappeared while it was being prepared"):
        list(read_part(Part(file, 0, file.bytes), config))
