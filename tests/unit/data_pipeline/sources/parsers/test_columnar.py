import contextlib
import io
import json
import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from data_pipeline.config import ChatConfig, LimitConfig, PrepareConfig, RecordConfig
from data_pipeline.documents import Document, Reason, Rejection
from data_pipeline.sources.parsers import columnar, columnar_child
from data_pipeline.sources.parsers.columnar import ARROW, PARQUET
from data_pipeline.sources.parsers.source_format import Content, Origin
from data_pipeline.sources.streams import Budget, StreamError

ORIGIN = Origin("a.parquet", "web", "html")


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    output = io.BytesIO()
    pq.write_table(pa.table(columns), output, **options)
    return output.getvalue()


def items_of(
    data: bytes, limits: LimitConfig | None = None, file_format: str = "parquet", **records: object
) -> Iterator[Document | Rejection]:
    config = PrepareConfig(sources=("builtin",), limits=limits or LimitConfig(), records=RecordConfig.model_validate(records))
    content = Content(ORIGIN, config, iter(()), Budget(config.limits, lambda: 0), io.BytesIO(data), len(data))
    return {"parquet": PARQUET, "arrow": ARROW}[file_format].read(content)


def read(
    data: bytes, limits: LimitConfig | None = None, file_format: str = "parquet", **records: object
) -> list[Document | Rejection]:
    return list(items_of(data, limits, file_format, **records))


def outcomes(items: list[Document | Rejection]) -> list[str]:
    return [item.text if isinstance(item, Document) else f"<{item.reason}>" for item in items]


def refusal(data: bytes, limits: LimitConfig | None = None, file_format: str = "parquet", **records: object) -> StreamError:
    with pytest.raises(StreamError) as caught:
        read(data, limits, file_format, **records)
    return caught.value


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4", "brotli"])
def test_rows_become_documents_in_order(compression: str) -> None:
    texts = [f"{number} é\n" * (number % 7) for number in range(500)]
    items = read(parquet({"id": range(500), "text": texts}, compression=compression, row_group_size=130))
    assert outcomes(items) == texts
    assert items[3] == replace(ORIGIN.document(texts[3], 4, 0), unread=("id",))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_texts_of_every_type_are_read(kind: pa.DataType) -> None:
    column = pa.array(["a", None, "b", ""], pa.string()).cast(kind)
    assert outcomes(read(parquet({"text": column}))) == ["a", "<text-not-a-string>", "b", ""]


def test_a_text_that_is_no_utf8_is_rejected_with_its_row() -> None:
    column = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"caf\xe9"]).buffers())
    good, bad = read(parquet({"text": column}))
    assert isinstance(good, Document)
    assert isinstance(bad, Rejection)
    assert (bad.reason, bad.line, bad.sample) == (Reason.INVALID_UTF8, 2, "caf\\xe9")


def test_a_text_over_the_limit_is_rejected_and_the_next_one_is_read() -> None:
    assert outcomes(read(parquet({"text": ["x" * 65, "x" * 64]}), LimitConfig(max_line_bytes=64))) == [
        "<field-too-large>",
        "x" * 64,
    ]


def test_other_columns_can_come_along_as_strings_and_numbers() -> None:
    columns = {
        "text": ["t", "u"],
        "url": ["é", None],
        "n": [7, None],
        "x": [float("nan"), 0.5],
        "ok": [True, None],
        "when": pa.array([0, None], pa.timestamp("s")),
        "price": [Decimal("1.50"), None],
        "tags": [["a"], None],
        "bytes": [b"\xff", None],
    }
    first, second = read(parquet(columns), metadata=[*columns, "missing"])
    assert isinstance(first, Document)
    assert isinstance(second, Document)
    assert first.metadata == (
        r'{"bytes":"\\xff","n":7,"ok":true,"price":"1.50","text":"t","url":"é","when":"1970-01-01 00:00:00.000"}'
    )
    assert second.metadata == '{"text":"u","x":0.5}'


def test_many_large_rows_are_no_burden() -> None:
    texts = ["x" * 300_000] * 100
    assert outcomes(read(parquet({"text": texts}, use_dictionary=False, compression="none"))) == texts


@pytest.mark.parametrize(
    ("columns", "reason", "detail"),
    [
        ({"body": ["a"]}, Reason.NO_TEXT_FIELD, "no column 'text'; the columns are 'body'; see records.text_field"),
        ({"text": [1]}, Reason.TEXT_NOT_A_STRING, "column 'text' has type int64"),
        ({"text": [["a"]]}, Reason.TEXT_NOT_A_STRING, "column 'text' has type list"),
    ],
)
def test_a_file_without_texts_is_refused_with_what_is_there(columns: dict[str, Any], reason: Reason, detail: str) -> None:
    error = refusal(parquet(columns))
    assert error.reason == reason
    assert error.detail.startswith(detail)


def test_a_column_that_stands_twice_is_refused() -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    output = io.BytesIO()
    pq.write_table(table, output)
    assert refusal(output.getvalue()).reason == Reason.DUPLICATE_KEY


GOOD = parquet({"text": ["some words"] * 100})


@pytest.mark.parametrize(
    "data",
    [b"", b"PAR1", b"no parquet at all", GOOD[:-20], GOOD[:-8] + b"\xff\xff\xff\x7f" + GOOD[-4:], b"PAR1" + bytes(100) + b"PAR1"],
    ids=["empty", "magic", "words", "cut short", "footer of 2 GiB", "zeros"],
)
def test_a_damaged_file_is_refused(data: bytes) -> None:
    assert refusal(data).reason == Reason.CORRUPT_PARQUET


def test_a_bomb_is_given_up_at_the_budget() -> None:
    bomb = parquet({"text": ["x" * 100_000] * 500}, compression="zstd")
    assert len(bomb) < 20_000
    error = refusal(bomb)
    assert error.reason == Reason.DECOMPRESSION_BUDGET


def test_rows_that_are_no_texts_spend_the_budget_too() -> None:
    bomb = parquet({"text": pa.nulls(100_000, pa.string())})
    assert refusal(bomb, LimitConfig(max_decompressed_bytes=50_000)).reason == Reason.DECOMPRESSION_BUDGET


def test_a_file_that_needs_more_memory_than_allowed_is_refused() -> None:
    giant = parquet({"text": ["x" * (100 << 20)]}, compression="zstd", use_dictionary=False)
    limits = LimitConfig(reader_memory_bytes=64 << 20, max_expansion=10**6)
    assert refusal(giant, limits).reason == Reason.READER_MEMORY


@pytest.mark.parametrize(
    ("program", "detail"),
    [
        ("import os; os.abort()", "its reader was ended by SIGABRT"),
        ("raise SystemExit(7)", "its reader ended with status 7"),
        ("import os; os.write(1, b'B' + b'\\xff' * 8)", "its reader sent a message of -1 bytes"),
        ("import os; os.write(1, b'R' + bytes([16]) + bytes(7) + b'\\xff' * 16)", "its reader requested -1 bytes at offset -1"),
    ],
)
def test_whatever_a_child_does_is_a_rejection_here(
    program: str, detail: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path_factory.mktemp("child") / "child.py"
    child.write_text(program)
    monkeypatch.setattr(columnar, "_CHILD", child)
    error = refusal(GOOD)
    assert error.reason == Reason.CORRUPT_PARQUET
    assert error.detail.startswith(detail)


@pytest.mark.parametrize(
    ("letter", "body", "detail"),
    [
        (b"B", b"", "its reader sent 0 rows in 0 bytes"),
        (b"B", (-1).to_bytes(8, "little", signed=True), "its reader sent -1 rows in 8 bytes"),
        (b"B", (3).to_bytes(8, "little") + bytes(50), "its reader sent 3 rows in 58 bytes"),
        (b"R", bytes(3), "its reader requested 0 bytes at offset -1"),
        (b"R", struct.pack("<qq", 0, (1 << 20) + 1), "its reader requested 1048577 bytes at offset 0"),
        (b"R", struct.pack("<qq", 1 << 40, 1), "its reader requested 1 bytes at offset 1099511627776"),
        (b"E", b"no such reason\0words", "words"),
    ],
)
def test_a_message_that_breaks_the_protocol_is_a_rejection_here(
    letter: bytes, body: bytes, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    message = letter + len(body).to_bytes(8, "little") + body
    child.write_text(f"import os, sys; sys.stdin.buffer.readline(); os.write(1, {message!r})")
    monkeypatch.setattr(columnar, "_CHILD", child)
    error = refusal(GOOD)
    assert (error.reason, error.detail.startswith(detail)) == (Reason.CORRUPT_PARQUET, True)


def test_a_silent_child_is_ended(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path_factory.mktemp("child") / "child.py"
    child.write_text("while True: pass")
    monkeypatch.setattr(columnar, "_CHILD", child)
    monkeypatch.setattr(columnar, "_SILENCE_S", 0.2)
    assert "silent" in refusal(GOOD).detail


def test_a_child_ends_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    items = items_of(GOOD)
    next(items)
    items.close()  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], signal.SIG_DFL)


def test_a_child_knows_no_secrets_of_its_parent(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = tmp_path_factory.mktemp("child") / "environment"
    child = seen.with_suffix(".py")
    child.write_text(f"import os; open({str(seen)!r}, 'w').write(repr(os.environ))")
    monkeypatch.setattr(columnar, "_CHILD", child)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-value")
    refusal(GOOD)
    assert "canary-value" not in seen.read_text()


def test_a_prompt_is_a_column_before_the_text() -> None:
    data = parquet({"text": ["a", "b", None, "d", "e" * 70], "q": ["x", None, "y", "", "z" * 70], "n": [1, 2, 3, 4, 5]})
    items = read(data, LimitConfig(max_line_bytes=64 << 10), prompt_field="q", metadata=["n"])
    assert outcomes(items) == ["x\na", "<text-not-a-string>", "<text-not-a-string>", "d", "z" * 70 + "\n" + "e" * 70]
    kept = [item for item in items if isinstance(item, Document)]
    assert [(item.parts, item.metadata) for item in kept] == [((2, 1), '{"n":1}'), ((), '{"n":4}'), ((71, 70), '{"n":5}')]


def test_a_prompt_that_is_missing_is_refused_with_the_setting() -> None:
    assert refusal(parquet({"text": ["a"]}), prompt_field="q").reason == Reason.NO_TEXT_FIELD
    assert "records.prompt_field" in refusal(parquet({"text": ["a"]}), prompt_field="q").detail
    assert refusal(parquet({"text": ["a"], "q": [1]}), prompt_field="q").reason == Reason.TEXT_NOT_A_STRING


def arrow(
    columns: dict[str, Any] | pa.Table, *, stream: bool = False, rows: int | None = None, compression: str | None = None
) -> bytes:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    output = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    write = pa.ipc.new_stream if stream else pa.ipc.new_file
    with write(output, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return output.getvalue()


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("stream", [True, False])
def test_arrow_files_and_streams_are_read_as_parquet_is(stream: bool, compression: str | None) -> None:
    columns = {"n": range(3000), "text": [f"{number} é\n" * (number % 7) for number in range(3000)], "url": ["u"] * 3000}
    data = arrow(columns, stream=stream, rows=1300, compression=compression)
    items = read(data, file_format="arrow", metadata=["url", "n", "missing"])
    assert items == read(parquet(columns), metadata=["url", "n", "missing"])
    assert items[2999] == ORIGIN.document(columns["text"][2999], 3000, 0, '{"n":2999,"url":"u"}')  # type: ignore[index]


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_a_column_of_metadata_that_occurs_twice_or_a_very_long_string_is_left_out(file_format: str) -> None:
    columns = [["a", "b"], ["u", "u"], ["v", "v"], ["x" * (1 << 16), "x" * (1 << 16 | 1)]]
    table = pa.Table.from_arrays([pa.array(column) for column in columns], names=["text", "url", "url", "note"])
    output = io.BytesIO()
    pq.write_table(table, output)
    data = output.getvalue() if file_format == "parquet" else arrow(table)
    first, second = read(data, file_format=file_format, metadata=["url", "note"])
    assert isinstance(first, Document)
    assert isinstance(second, Document)
    assert first.metadata == f'{{"note":"{"x" * (1 << 16)}"}}'
    assert not second.metadata


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.binary(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_arrow_texts_of_every_type_are_read(kind: pa.DataType) -> None:
    table = pa.table({"other": [[1], [], [2], [3]], "text": pa.array(["a", None, "b", ""], pa.string()).cast(kind)})
    for stream in (True, False):
        assert outcomes(read(arrow(table, stream=stream), file_format="arrow")) == ["a", "<text-not-a-string>", "b", ""]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_an_arrow_text_that_is_no_utf8_is_rejected_with_its_row(kind: pa.DataType) -> None:
    texts = pa.array([b"good", b"caf\xe9", b"more"]).view(pa.string())
    if pa.types.is_dictionary(kind):
        column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), texts)
    else:
        column = texts.view(pa.binary()).cast(columnar_child._BYTES[kind]).view(kind)
    items = read(arrow({"text": column, "note": column}), file_format="arrow", metadata=["note"])
    assert outcomes(items) == ["good", "<invalid-utf8>", "more"]
    assert [item.metadata for item in items if isinstance(item, Document)] == ['{"note":"good"}', '{"note":"more"}']


def test_an_arrow_file_without_texts_is_refused_with_what_is_there() -> None:
    assert refusal(arrow({"body": ["a"]}), file_format="arrow").detail.startswith("no column 'text'; the columns are 'body'")
    assert refusal(arrow({"text": [1]}), file_format="arrow").reason == Reason.TEXT_NOT_A_STRING


GOOD_ARROW, GOOD_STREAM = (arrow({"text": ["some words"] * 100}, stream=stream) for stream in (False, True))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"ARROW1",
        b"no arrow at all",
        GOOD_ARROW[:-20],
        arrow({"text": ["a"]}, stream=True)[:200],
        b"\xff" * 7 + b"\x7f",
    ],
    ids=["empty", "magic", "words", "cut short", "stream cut short", "message of 2 GiB"],
)
def test_a_damaged_arrow_file_is_refused(data: bytes) -> None:
    assert refusal(data, file_format="arrow").reason in (Reason.CORRUPT_ARROW, Reason.READER_MEMORY)


@hypothesis_settings(max_examples=15)
@given(st.data())
def test_an_arrow_file_with_changed_bytes_never_raises_anything_else(data: st.DataObject) -> None:
    content = bytearray(arrow({"text": ["some words", "é", None] * 3}, stream=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(StreamError):
        for item in read(bytes(content), file_format="arrow"):
            assert isinstance(item, Document | Rejection)


@pytest.mark.parametrize("wrong", [(0, 4, 1 << 30), (0, 1 << 30, 8), (0, 9, 8), (0, -4, 8)])
def test_offsets_outside_of_the_buffers_or_out_of_order_are_refused(wrong: tuple[int, ...]) -> None:
    offsets = np.array([0, 4, 8], np.int32).tobytes()
    for stream in (True, False):
        data = arrow({"text": ["some", "text"]}, stream=stream)
        assert data.count(offsets) == 1
        damaged = data.replace(offsets, np.array(wrong, np.int32).tobytes())
        error = refusal(damaged, file_format="arrow")
        assert error.reason == Reason.CORRUPT_ARROW
        assert error.detail.startswith("ArrowInvalid: ")  # the child has checked them, and was not ended by a wrong address


def test_an_arrow_bomb_is_given_up_at_the_budget_or_the_memory_limit() -> None:
    bomb = arrow({"text": ["x" * 100_000] * 500}, compression="zstd", rows=10)
    assert refusal(bomb, file_format="arrow").reason == Reason.DECOMPRESSION_BUDGET
    giant = arrow({"text": ["x" * (100 << 20)]}, compression="zstd")
    limits = LimitConfig(reader_memory_bytes=64 << 20, max_expansion=10**6)
    assert refusal(giant, limits, file_format="arrow").reason == Reason.READER_MEMORY


def chats(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(one.text) for one in chat_documents(columns, messages_field="messages")]


def chat_documents(columns: dict[str, Any], **records: object) -> list[Document]:
    config = PrepareConfig(
        sources=("builtin",),
        records=RecordConfig.model_validate(records),
        chat=ChatConfig.model_validate({"template": "chatml"}),
    )
    file = io.BytesIO(parquet(columns))
    origin = Origin("a.parquet", markup="chat")
    content = Content(origin, config, iter(()), Budget(config.limits, lambda: 0), file, len(file.getvalue()))
    return [one for one in PARQUET.read(content) if isinstance(one, Document)]


def test_columns_of_maps_are_objects() -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    messages = [{"role": "user", "content": "Ask"}, {"role": "assistant", "content": "Say"}]
    [found] = chats({"messages": pa.array([[list(one.items()) for one in messages]], kind)})
    assert found["messages"] == messages


def test_a_field_that_only_other_rows_have_is_absent() -> None:
    def turn(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "user", "content": "Ask", "name": "Ann"} if name == "time" else {"role": "user", "content": "Ask"},
            {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]},
        ]

    rows = [turn("weather", {"city": "Oslo"}), turn("time", {"zone": "west", "at": [1]})]
    assert [one["messages"] for one in chats({"messages": rows})] == rows


def test_a_column_that_only_says_whether_there_is_reasoning_is_counted() -> None:
    columns = {"input": ["Ask"], "output": ["Say"], "reasoning": ["off"], "title": ["T"]}
    [item] = chat_documents(columns, prompt_field="input", text_field="output")
    assert json.loads(item.text) == {"prompt": "Ask", "response": "Say"}
    assert item.unread == ("title", "reasoning")
