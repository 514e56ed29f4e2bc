"""Read one Parquet or Arrow file in a separate process, which `columnar` starts. The C++ library trusts the sizes in a file.

This process has a memory limit and cannot write files. It gets the bytes from its parent, so it needs no network.

The first line on standard input is the request, a JSON object. Then messages go to standard output. Each is a letter, a 64-bit
length in bytes, and a body of that length. All numbers are little-endian.

    R  offset and size, 64 bits each    the parent answers on standard input with a 64-bit length and the bytes
    B  rows: their number n, 64 bits; n lengths of texts and n lengths of prompts (-1: null, -2: too large); n lengths of metadata;
       the texts; the prompts; the metadata. With `chat_fields` a text is a JSON object of these columns (-3: not UTF-8)
    U  the names of the columns that are not read, each but the last followed by a NUL; before the first rows
    E  reason and explanation, separated by a NUL; the last message of a file that cannot be read further. The explanation of
       no-text-field is a JSON object with the name of the missing column, the setting that names it, and the columns
    Z  empty; the last message of a file that was read to its end
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
from array import array
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from common.child_process import forbid_files, limit_memory

_MAX_BATCH_ROWS = 1024
_READ_BYTES = 1 << 20
_MESSAGE_BYTES = 4 << 20
_MAX_METADATA_CHARS = 1 << 16
_FILE_MAGIC = b"ARROW1"
_NULL, _TOO_LARGE, _NOT_UTF8 = -1, -2, -3
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}


class _Refused(Exception):  # noqa: N818 - an outcome of reading, not a fault
    """The file has no column of texts."""


def main() -> None:
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    request = json.loads(source.readline())
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    forbid_files()
    limit_memory(request["memory_bytes"])
    try:
        _read(_RemoteFile(source, sink, request["bytes"]), request, sink)
        _send(sink, b"Z", b"")
    except _Refused as error:
        _send(sink, b"E", "\0".join(error.args).encode("utf-8", "backslashreplace"))
    except MemoryError:
        _send(sink, b"E", b"reader-memory\0it needs more memory than limits.reader_memory_bytes")
    except Exception as error:  # the file may be hostile, so any error of the library is possible
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        _send(sink, b"E", f"corrupt-{request['format']}\0{text}".encode("utf-8", "backslashreplace"))


def _read(file: io.RawIOBase, request: dict[str, Any], sink: io.BufferedWriter) -> None:
    chat_fields: dict[str, str] | None = request["chat_fields"]
    batches = _parquet_batches if request["format"] == "parquet" else _arrow_batches
    for number, batch in enumerate(batches(file, request)):
        if not number:
            _send(sink, b"U", "\0".join(request["unread"]).encode("utf-8", "backslashreplace"))
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if chat_fields is not None:
            chat = {name: columns[column] for name, column in chat_fields.items()}
            chat |= {name: columns[name] for name in request["optional"] if name in columns}
            rows = ({name: column[row] for name, column in chat.items()} for row in range(batch.num_rows))
            found = [[_object(row, request["max_text_bytes"]) for row in rows]]
        else:
            found = [_texts(columns[name], request["max_text_bytes"]) for name in request["needed"]]
        texts = found[0]
        prompts: list[bytes | int] = found[1] if len(found) > 1 else [b""] * batch.num_rows
        for name in request["optional"] if len(found) > 1 else ():
            if name in columns and _is_text(columns[name].type):
                extra = _texts(columns[name], request["max_text_bytes"])
                prompts = [_joined(*pair) for pair in zip(prompts, extra, strict=True)]
        fields = [(name, _values(columns[name])) for name in sorted({*request["metadata"]} & {*columns})]
        kept = ({name: values[row] for name, values in fields if values[row] is not None} for row in range(batch.num_rows))
        records = [json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode() if one else b"" for one in kept]
        _send_rows(sink, texts, prompts, records)


def _parquet_batches(file: io.RawIOBase, request: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    source = pa.PythonFile(file, mode="r")
    table = pq.ParquetFile(source, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True)
    columns = _wanted(table.schema_arrow, request)
    # Batches that fill about one message, by the sizes that the file states.
    groups = [table.metadata.row_group(number) for number in range(min(table.metadata.num_row_groups, 16))]
    num_bytes, num_rows = sum(group.total_byte_size for group in groups), sum(group.num_rows for group in groups)
    batch_rows = int(min(max(_MESSAGE_BYTES * num_rows // max(num_bytes, 1), 1), _MAX_BATCH_ROWS))
    yield from table.iter_batches(batch_rows, columns=columns, use_threads=False)


def _arrow_batches(file: io.RawIOBase, request: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of an Arrow IPC file (Feather 2), or of an Arrow IPC stream, as Hugging Face's datasets library writes it."""
    open_reader = pa.ipc.open_file if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC else pa.ipc.open_stream
    file.seek(0)
    schema = open_reader(pa.PythonFile(file, mode="r")).schema
    columns = [schema.get_field_index(name) for name in _wanted(schema, request)]
    file.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False, ensure_native_endian=True)
    reader = open_reader(pa.PythonFile(file, mode="r"), options=options)
    numbered = isinstance(reader, pa.ipc.RecordBatchFileReader)
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if numbered else reader:
        batch.validate()
        for column in batch.columns:
            _as_bytes(column).validate(full=True)  # the library does not check that offsets are inside of their buffers
        for first in range(0, batch.num_rows, _MAX_BATCH_ROWS):
            yield batch.slice(first, _MAX_BATCH_ROWS)


def _wanted(schema: pa.Schema, request: dict[str, Any]) -> list[str]:
    """Return the columns to read. Refuses the file if a needed one is missing, occurs twice or, except in a chat, has no texts."""
    for column, setting in request["needed"].items():
        found = schema.names.count(column)
        if found != 1:
            if not found:
                raise _Refused(
                    "no-text-field",
                    json.dumps({"name": column, "fields": schema.names[: request["max_names"]], "setting": setting}),
                )
            raise _Refused("duplicate-key", f"column {column!r} occurs twice")
        kind = schema.field(column).type
        if request["chat_fields"] is None and not _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
            raise _Refused("text-not-a-string", f"column {column!r} has type {kind}, but strings or bytes are expected")
    others = dict.fromkeys((*request["optional"], *request["metadata"]))
    names = schema.names[: request["max_names"]]
    request["unread"] = [name for name in names if name not in request["needed"] and name not in others]
    return [*request["needed"], *(name for name in others if schema.names.count(name) == 1 and name not in request["needed"])]


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())


def _joined(prompt: bytes | int, more: bytes | int) -> bytes | int:
    return prompt + b"\n\n" + more if isinstance(prompt, bytes) and isinstance(more, bytes) and more else prompt


def _without_none(value: Any) -> Any:
    """Return a value without the nulls of structs: a column of structs has all fields that any of its rows has."""
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _object(values: dict[str, pa.Scalar], max_bytes: int) -> bytes | int:
    try:
        found = {name: _without_none(value.as_py(maps_as_pydicts="strict")) for name, value in values.items()}
        data = json.dumps(found, ensure_ascii=False, default=_plain).encode()
    except UnicodeError:
        return _NOT_UTF8
    return data if len(data) <= max_bytes else _TOO_LARGE


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _texts(column: pa.Array, max_bytes: int) -> list[bytes | int]:
    buffers = (value.as_buffer() for value in _as_binary(column))
    return [_NULL if buffer is None else bytes(buffer) if buffer.size <= max_bytes else _TOO_LARGE for buffer in buffers]


def _as_bytes(column: pa.Array) -> pa.Array:
    """Return a column with its texts as bytes, in the same buffers. The parent checks that they are UTF-8, each text alone."""
    if pa.types.is_dictionary(column.type):
        return pa.DictionaryArray.from_arrays(column.indices, _as_bytes(column.dictionary))
    kind = _BYTES.get(column.type)
    return column if kind is None else column.view(kind)


def _as_binary(column: pa.Array) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    column = column.cast(kind) if kind != column.type else column
    return column.cast(pa.large_binary())


def _values(column: pa.Array) -> list[Any]:
    """Return strings and finite numbers as they are, times and decimal numbers as strings, and None for all others."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if _is_text(kind):
        strings = (text and text.decode("utf-8", "backslashreplace") for text in _as_binary(column).to_pylist())
        return [None if string is None or len(string) > _MAX_METADATA_CHARS else string or "" for string in strings]
    if pa.types.is_temporal(kind) or pa.types.is_decimal(kind):
        return list(column.cast(pa.string()).to_pylist())
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return [None if isinstance(value, float) and not math.isfinite(value) else value for value in column.to_pylist()]
    return [None] * len(column)


def _send_rows(sink: io.BufferedWriter, texts: list[bytes | int], prompts: list[bytes | int], records: list[bytes]) -> None:
    first = num_bytes = 0
    sizes, prompt_sizes = ([text if isinstance(text, int) else len(text) for text in column] for column in (texts, prompts))
    for row, size in enumerate(sizes, 1):
        num_bytes += max(size, 0) + max(prompt_sizes[row - 1], 0)
        if num_bytes >= _MESSAGE_BYTES or row == len(sizes):
            body = [text for column in (texts, prompts) for text in column[first:row] if not isinstance(text, int)]
            lengths = array("q", sizes[first:row] + prompt_sizes[first:row] + [len(record) for record in records[first:row]])
            _send(sink, b"B", struct.pack("<q", row - first), lengths.tobytes(), *body, *records[first:row])
            first, num_bytes = row, 0


def _send(sink: io.BufferedWriter, letter: bytes, *pieces: bytes) -> None:
    sink.write(letter + struct.pack("<q", sum(map(len, pieces))))
    sink.writelines(pieces)
    sink.flush()


class _RemoteFile(io.RawIOBase):
    def __init__(self, source: io.BufferedReader, sink: io.BufferedWriter, num_bytes: int) -> None:
        self._source = source
        self._sink = sink
        self._bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._bytes)[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        end = self._bytes if size < 0 else min(self._position + size, self._bytes)
        pieces = []
        while self._position < end:
            _send(self._sink, b"R", struct.pack("<qq", self._position, min(end - self._position, _READ_BYTES)))
            [length] = struct.unpack("<q", self._source.read(8))
            pieces.append(self._source.read(length))
            self._position += length
        return b"".join(pieces)


if __name__ == "__main__":
    main()
