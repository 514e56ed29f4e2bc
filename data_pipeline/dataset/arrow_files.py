"""Read Arrow IPC files from untrusted sources: message by message, in place, without decompression.

The reader of the Arrow library follows the offsets in the footer and decompresses the buffers, so a file of some kilobytes can use
gigabytes of memory. This project writes uncompressed files, so compressed files are refused before they are read.

Format: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format; the flatbuffers are defined in Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

__all__ = ["ArrowFile", "open_arrow"]

_MAGIC = b"ARROW1\0\0"
_HEADER_OF_MESSAGE, _COMPRESSION_OF_BATCH = 2, 3  # field numbers in Message.fbs


@dataclass(frozen=True)
class ArrowFile:
    """An Arrow IPC file in memory, or mapped into memory."""

    schema: pa.Schema
    _messages: pa.ipc.MessageReader

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the record batches in order, without a copy, once; ValueError if one is damaged or compressed."""
        while (message := _next_message(self._messages)) is not None:
            if message.type != "record batch":
                raise ValueError(f"a message has type {message.type!r}, but a record batch is expected")
            if _is_compressed(message.metadata):
                raise ValueError("a record batch is compressed, but prepared data is never compressed")
            try:
                yield pa.ipc.read_record_batch(message, self.schema)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"a record batch cannot be read ({error})") from None


def open_arrow(content: pa.Buffer) -> ArrowFile:
    """Open the Arrow IPC file in a buffer; ValueError if it is not one."""
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("it does not begin with the bytes of an Arrow file")
    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(content.slice(len(_MAGIC))))
    message = _next_message(messages)
    if message is None or message.type != "schema":
        raise ValueError("it does not begin with a schema")
    try:
        return ArrowFile(pa.ipc.read_schema(message), messages)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema cannot be read ({error})") from None


def _next_message(messages: pa.ipc.MessageReader) -> pa.ipc.Message | None:
    try:
        return messages.read_next_message()
    except StopIteration:
        return None
    except (pa.ArrowException, OSError) as error:  # the library raises OSError for damaged data, also in memory
        raise ValueError(f"a message cannot be read ({error})") from None


def _is_compressed(metadata: pa.Buffer) -> bool:
    try:
        message = struct.unpack_from("<I", metadata)[0]
        at = message + _field(metadata, message, _HEADER_OF_MESSAGE)
        return _field(metadata, at + struct.unpack_from("<I", metadata, at)[0], _COMPRESSION_OF_BATCH) != 0
    except struct.error:
        raise ValueError("the metadata of a record batch is damaged") from None


def _field(metadata: pa.Buffer, table: int, number: int) -> int:
    """Return the offset of a field from the start of its flatbuffer table; 0 if the table has no such field."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    num_bytes = struct.unpack_from("<H", metadata, fields)[0]
    at = 4 + 2 * number
    return int(struct.unpack_from("<H", metadata, fields + at)[0]) if at < num_bytes else 0
