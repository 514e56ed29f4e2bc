"""Tables of documents on disk, which are Arrow IPC files, and a reader of such files that trusts nothing.

Arrow's reader follows offsets and decompresses, so kilobytes can use gigabytes. This one reads message by message, in place, and
refuses compression. Format: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format, and Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from common.files import digest_file, unfinished_path
from data_pipeline.dataset.layout import LOSS_RUNS

_BATCH_BYTES = 4 << 20  # text in one record batch; limits the memory of every stage


CHOSEN_SCHEMA = pa.schema([("copies", pa.uint8())])
DOCUMENTS_SCHEMA = pa.schema([("id", pa.uint64()), ("kind", pa.uint8()), ("tokens", pa.uint32())])
LABELS_SCHEMA = pa.schema([("id", pa.uint64()), ("label", pa.uint16())])


def tokens_schema(ids_type: np.dtype[np.unsignedinteger], *, has_mask: bool = False) -> pa.Schema:
    mask = [(LOSS_RUNS, pa.list_(pa.uint32()))] if has_mask else []
    return pa.schema(
        [
            ("id", pa.uint64()),
            ("split", pa.uint8()),
            ("kind", pa.uint8()),
            ("language", pa.string()),
            ("metadata", pa.string()),
            ("characters", pa.uint32()),
            ("bytes", pa.uint32()),
            ("perplexity", pa.uint16()),
            ("wanted", pa.uint16()),
            ("tokens", pa.large_list(pa.from_numpy_dtype(ids_type))),
            *mask,
        ]
    )


class TableWriter:
    """Writes an Arrow file in batches, and renames it to its final name when it is complete."""

    def __init__(self, output: Path, schema: pa.Schema) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self._path = data_path(output)
        self._temporary = unfinished_path(self._path)
        self._schema = schema
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0
        self.digest = ""

    def __enter__(self) -> TableWriter:
        self._file = pa.OSFile(str(self._temporary), "wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)
        return self

    @property
    def written(self) -> dict[Path, str]:
        return {self._path: self.digest}

    def add(self, row: tuple[Any, ...], num_bytes: int) -> None:
        """Rows are collected into batches of a few MiB."""
        self._rows.append(row)
        self._bytes += num_bytes
        if self._bytes >= _BATCH_BYTES:
            self._flush()

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def _flush(self) -> None:
        if self._rows:
            columns = [
                pa.array(column, kind) for column, kind in zip(zip(*self._rows, strict=True), self._schema.types, strict=True)
            ]
            self.write(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._rows, self._bytes = [], 0

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._flush()
        self._writer.close()
        self._file.close()
        if error is not None:
            self._temporary.unlink(missing_ok=True)
            return
        self._temporary.rename(self._path)
        self.digest = digest_file(self._path)


def read_batches(output: Path) -> Iterable[pa.RecordBatch]:
    return open_arrow(pa.memory_map(str(data_path(output))).read_buffer())[1]


def read_table(output: Path) -> pa.Table:
    schema, batches = open_arrow(pa.memory_map(str(data_path(output))).read_buffer())
    return pa.Table.from_batches(batches, schema).combine_chunks()


def check_values(found: pa.RecordBatch | pa.Table, schemas: Sequence[pa.Schema], bounds: Mapping[str, int]) -> None:
    """Raise ValueError if rows of prepared data, which may come from anyone, could not be used.

    Their schema is one of `schemas`, and the values of a column, or those in its lists, are less than its bound.
    """
    if not any(found.schema.equals(schema) for schema in schemas):
        raise ValueError("the columns are not those that `prepare` writes")
    found.validate(full=True)  # invalid offsets would crash this process
    for name, kind in zip(found.schema.names, found.schema.types, strict=True):
        column = found.column(name)
        if column.null_count and name not in ("language", "metadata"):
            raise ValueError(f"{name} is null")
        if name in bounds:
            values = column.flatten() if pa.types.is_large_list(kind) else column
            if values.null_count or int(values.to_numpy().max(initial=0)) >= bounds[name]:
                raise ValueError(f"a value of {name} is not less than {bounds[name]}")


def read_side_by_side(output: Path, other: Path) -> Iterator[tuple[pa.RecordBatch, pa.Table]]:
    """Yield each batch of an output with the matching rows of another, small output."""
    rows = read_table(other)
    position = 0
    for batch in read_batches(output):
        yield batch, rows.slice(position, batch.num_rows)
        position += batch.num_rows


def data_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.arrow")


_MAGIC = b"ARROW1\0\0"
_HEADER_OF_MESSAGE, _COMPRESSION_OF_BATCH = 2, 3  # field numbers in Message.fbs


def open_arrow(content: pa.Buffer) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Without a copy. ValueError: it is no Arrow IPC file, or a batch is damaged or compressed."""
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("it does not begin with the bytes of an Arrow file")
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(content.slice(len(_MAGIC))))
    message = _next_message(messages)
    if message is None or message.type != "schema":
        raise ValueError("it does not begin with a schema")
    try:
        schema = pa.ipc.read_schema(message)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema cannot be read ({error})") from None
    return schema, _batches(messages, schema)


def _batches(messages: pa.ipc.MessageReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    while (message := _next_message(messages)) is not None:
        if message.type != "record batch":
            raise ValueError(f"a message has type {message.type!r}, but a record batch is expected")
        metadata = message.metadata
        try:
            table = struct.unpack_from("<I", metadata)[0]
            at = table + _field(metadata, table, _HEADER_OF_MESSAGE)
            is_compressed = _field(metadata, at + struct.unpack_from("<I", metadata, at)[0], _COMPRESSION_OF_BATCH) != 0
        except struct.error:
            raise ValueError("the metadata of a record batch is damaged") from None
        if is_compressed:
            raise ValueError("a record batch is compressed, but prepared data is never compressed")
        try:
            yield pa.ipc.read_record_batch(message, schema)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"a record batch cannot be read ({error})") from None


def _next_message(messages: pa.ipc.MessageReader) -> pa.ipc.Message | None:
    try:
        return messages.read_next_message()
    except StopIteration:
        return None
    except (pa.ArrowException, OSError) as error:  # the library raises OSError for damaged data, also in memory
        raise ValueError(f"a message cannot be read ({error})") from None


def _field(metadata: pa.Buffer, table: int, number: int) -> int:
    """Return the offset of a field from the start of its flatbuffer table; 0 if the table has no such field."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    num_bytes = struct.unpack_from("<H", metadata, fields)[0]
    at = 4 + 2 * number
    return int(struct.unpack_from("<H", metadata, fields + at)[0]) if at < num_bytes else 0
