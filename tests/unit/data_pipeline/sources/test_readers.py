import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.inputs import InputFile, Part, cut_into_partitions, find_inputs
from data_pipeline.sources.parsers.source_format import Content, Origin
from data_pipeline.sources.parsers.text_files import TEXT
from data_pipeline.sources.readers import read_part
from data_pipeline.sources.streams import Budget


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
    assert "byte 0xe9 is not UTF-8" in item.detail


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
@pytest.mark.parametrize(("name", "content"), [("a.txt", "grüne Wörter\n😀"), ("a.jsonl", '{"text": "grüne Wörter\\n😀"}\n')])
def test_a_byte_order_mark_names_the_encoding(tmp_path: Path, encoding: str, name: str, content: str) -> None:
    (tmp_path / name).write_bytes(content.encode(encoding))
    [item] = read_all(tmp_path)
    assert isinstance(item, Document)
    assert item.text == "grüne Wörter\n😀"


def test_text_that_is_not_what_its_byte_order_mark_says_is_rejected_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("some words".encode("utf-16")[:-1])
    [item] = read_all(tmp_path)
    assert isinstance(item, Rejection)
    assert "utf-16" in item.detail


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("partition_bytes", [1 << 12, 1 << 20])
def test_lines_in_another_encoding_are_read_to_the_end(tmp_path: Path, encoding: str, partition_bytes: int) -> None:
    wanted = [f"{number} \U0001f600" + "\u65e5\u672c" * 20 for number in range(300)]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in wanted)
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "a.jsonl").write_bytes((mark + lines).encode(encoding))
    assert texts(read_all(tmp_path, partition_bytes=partition_bytes)) == wanted


def test_an_array_in_utf_16_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(json.dumps([{"text": f"number {number}"} for number in range(9000)]).encode("utf-16"))
    assert len(texts(read_all(tmp_path))) == 9000


def test_a_file_too_large_for_one_document_is_rejected_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 100)
    [item] = read_all(tmp_path, limits={"max_document_bytes": 64})
    assert isinstance(item, Rejection)
    assert item.reason == Reason.FILE_TOO_LARGE
    assert "set text.documents to chunks" in item.detail


def test_a_paragraph_too_large_for_one_document_is_rejected_and_the_next_one_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("before\n\n" + "word " * 6 + "\na line" * 9 + "\n\nafter\n\n" + "x" * 64)
    before, too_large, after, largest = read_all(tmp_path, text={"documents": "paragraphs"}, limits={"max_document_bytes": 64})
    assert texts([before, after, largest]) == ["before", "after", "x" * 64]
    assert isinstance(too_large, Rejection)
    assert (too_large.reason, too_large.line, too_large.sample) == (Reason.FILE_TOO_LARGE, 3, "word " * 6)
    assert "a paragraph of more than limits.max_document_bytes = 64; set text.documents to chunks" in too_large.detail


def test_the_memory_for_a_paragraph_does_not_grow_with_its_length(tmp_path: Path) -> None:
    config = PrepareConfig(sources=("builtin",), limits={"max_document_bytes": 1 << 16}, text={"documents": "paragraphs"})
    blocks = (b"one sentence to a line.\n" * 4096 for _ in range(100))
    tracemalloc.start()
    [item] = TEXT.read(Content(Origin("a.txt"), config, blocks, Budget(config.limits, lambda: 0)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(item, Rejection)
    assert peak_bytes < 1 << 20


def test_what_a_damaged_archive_gives_before_its_damage_is_kept(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "line %d"}\n' % n for n in range(200_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    items = read_all(tmp_path)
    assert isinstance(items[-1], Rejection)
    assert items[-1].reason == Reason.CORRUPT_COMPRESSION
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


LINES = b'{"text": "one", "id": 1}\n{"text": "two", "id": 2}\n'
TABLE = b"id,text\n1,one\n2,two\n"


def parquet_file() -> bytes:
    output = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two"]}), output)
    return output.getvalue()


FILES = {
    "a.jsonl": LINES,
    "a.csv": TABLE,
    "a.tsv": TABLE.replace(b",", b"\t"),
    "a.parquet": parquet_file(),
    "a.txt": b"one",
    "a.py": b"one",
    "a.html": b"one",
}
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
    ".bz2": bz2.compress,
}


def tar_of(files: dict[str, bytes]) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return output.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return output.getvalue()


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_format_is_read_alone_compressed_and_in_archives(name: str, compression: str, tmp_path: Path) -> None:
    data = COMPRESSIONS[compression](FILES[name])
    (tmp_path / f"{name}{compression}").write_bytes(data)
    alone = read_all(tmp_path)
    (tmp_path / f"{name}{compression}").unlink()
    assert "".join(texts(alone)) in ("one", "onetwo")
    member = f"in/{name}{compression}"
    for archive, content in (
        ("b.zip", zip_of({member: data})),
        (f"b.tar{compression}", COMPRESSIONS[compression](tar_of({member: data}))),
    ):
        (tmp_path / archive).write_bytes(content)
        inside = read_all(tmp_path)
        assert [replace(item, path="") for item in inside] == [replace(item, path="") for item in alone]
        assert {item.path for item in inside} == {f"{archive}!/{member}"}
        (tmp_path / archive).unlink()


def documents(items: list[Document | Rejection]) -> list[Document]:
    return [item for item in items if isinstance(item, Document)]


def test_documents_say_what_they_are(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.py", "a.html", "a.txt"):
        (tmp_path / name).write_bytes(FILES[name])
    (tmp_path / "b.tar").write_bytes(tar_of({name: FILES[name] for name in ("a.py", "a.html")}))
    kinds = {(item.path, item.kind, item.markup) for item in documents(read_all(tmp_path))}
    assert kinds == {
        ("a.jsonl", "prose", "plain"),
        ("a.py", "code", "plain"),
        ("a.html", "web", "html"),
        ("a.txt", "prose", "plain"),
        ("b.tar!/a.py", "code", "plain"),
        ("b.tar!/a.html", "web", "html"),
    }
    of_pages = documents(read_all(tmp_path, records={"markup": "html", "metadata": ["id"]}))
    assert ("web", "html", '{"id":1}') in {(item.kind, item.markup, item.metadata) for item in of_pages if item.path == "a.jsonl"}


def test_a_source_can_say_what_all_of_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.zip").write_bytes(zip_of({"a.txt": b"x", "a.html": b"y"}))
    config = PrepareConfig(source={"mine": {"paths": [str(tmp_path)], "kind": "code", "records": {"text_field": "id"}}})
    found = find_inputs(config, tmp_path / "digests.json")
    own = config.for_source("mine")
    items = [item for file in found for item in read_part(Part(file, 0, file.bytes), own)]
    assert {item.kind for item in items if isinstance(item, Document)} == {"code"}
    assert [item.reason for item in items if isinstance(item, Rejection)] == [Reason.TEXT_NOT_A_STRING] * 2


def test_code_is_one_document_a_file_or_what_the_settings_say(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a = 1\n\nb = 2\n")
    assert texts(read_all(tmp_path)) == ["a = 1\n\nb = 2\n"]
    assert texts(read_all(tmp_path, text={"documents": "paragraphs"})) == ["a = 1", "b = 2"]


def test_a_damaged_member_ends_itself_and_a_damaged_archive_ends_there(tmp_path: Path) -> None:
    members = {"a.txt": b"one", "b.jsonl.gz": gzip.compress(LINES)[:-9], "c.parquet": b"none", "d.txt": b"two"}
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_of(members)))
    items = read_all(tmp_path)
    assert texts(items) in (["one", "two"], ["one", "one", "two", "two"])
    assert [(item.reason, item.path) for item in items if isinstance(item, Rejection)] == [
        (Reason.CORRUPT_COMPRESSION, "a.tar.gz!/b.jsonl.gz"),
        (Reason.CORRUPT_PARQUET, "a.tar.gz!/c.parquet"),
    ]
    noise = random.Random(0).randbytes(300_000)
    cut = gzip.compress(tar_of({"a.txt": b"one", "b.txt": noise.hex().encode(), "c.txt": b"two"}))[:100_000]
    (tmp_path / "a.tar.gz").write_bytes(cut)
    one, rest = read_all(tmp_path)
    assert texts([one]) == ["one"]
    assert isinstance(rest, Rejection)
    assert (rest.reason, rest.path, rest.line) == (Reason.CORRUPT_COMPRESSION, "a.tar.gz", 0)


@pytest.mark.parametrize("archive", ["a.tar", "a.tar.gz", "a.zip"])
def test_bombs_in_an_archive_share_one_budget(archive: str, tmp_path: Path) -> None:
    bombs = {f"{number}.txt.gz": gzip.compress(bytes(1 << 19)) for number in range(8)}
    data = {"a.tar": tar_of(bombs), "a.tar.gz": gzip.compress(tar_of(bombs)), "a.zip": zip_of(bombs)}[archive]
    (tmp_path / archive).write_bytes(data)
    items = read_all(tmp_path, limits={"max_expansion": 10})
    assert [item.reason for item in items if isinstance(item, Rejection)] == [Reason.DECOMPRESSION_BUDGET]
    assert len(texts(items)) == 2, "two fill the megabyte that harms nobody"


def test_a_parquet_file_in_an_archive_must_fit_in_memory(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"a.parquet": parquet_file()}))
    [item] = read_all(tmp_path, limits={"max_document_bytes": 64})
    assert isinstance(item, Rejection)
    assert (item.reason, item.path) == (Reason.FILE_TOO_LARGE, "a.zip!/a.parquet")


@given(
    data=st.binary(max_size=300),
    name=st.sampled_from([*FILES, "a.tar", "a.zip", "a.jsonl.xz", "a.tsv.bz2", "a.tgz"]).filter(lambda n: "parquet" not in n),
)
def test_no_content_raises(data: bytes, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("noise")
    (folder / name).write_bytes(b"x" + data)
    for item in read_all(folder):
        if isinstance(item, Document):
            item.text.encode()
