"""Reads Arrow IPC files that a stranger may have written: message by message, in place, without decompression.

The library's own reader of such files follows the offsets in the footer, and decompresses what it finds: some kilobytes of a file
can become gigabytes of memory. What this project writes is uncompressed, so a file that is compressed is refused unread.

Format: https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format; the flatbuffers are defined in Message.fbs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

__all__ = ["ArrowFile", "open_arrow"]

_MAGIC = b"ARROW1\0\0"
_HEADER_OF_MESSAGE, _COMPRESSION_OF_BATCH = 2, 3  # numbers of the fields in Message.fbs


@dataclass(frozen=True)
class ArrowFile:
    """An Arrow IPC file in memory, or mapped."""

    schema: pa.Schema
    _messages: pa.ipc.MessageReader

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The record batches in their order, each where it lies; to be called once.

        Raises:
            ValueError: a message is damaged or compressed.
        """
        while (message := _next_message(self._messages)) is not None:
            if message.type != "record batch":
                raise ValueError(f"a message of type {message.type!r} where a record batch is expected")
            if _is_compressed(message.metadata):
                raise ValueError("a record batch is compressed, which those of prepared data never are")
            try:
                yield pa.ipc.read_record_batch(message, self.schema)
            except (pa.ArrowException, OSError) as error:
                raise ValueError(f"a record batch cannot be read ({error})") from None


def open_arrow(content: pa.Buffer) -> ArrowFile:
    """The Arrow IPC file that is the content of a buffer.

    Raises:
        ValueError: it is none.
    """
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        raise ValueError("it does not begin as an Arrow file does")
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
    except (pa.ArrowException, OSError) as error:  # the library's errors of reading are OSError, also where memory is read
        raise ValueError(f"a message cannot be read ({error})") from None


def _is_compressed(metadata: pa.Buffer) -> bool:
    """Whether the buffers of a record batch are compressed, by the flatbuffer of its message."""
    try:
        message = struct.unpack_from("<I", metadata)[0]
        at = message + _field(metadata, message, _HEADER_OF_MESSAGE)
        return _field(metadata, at + struct.unpack_from("<I", metadata, at)[0], _COMPRESSION_OF_BATCH) != 0
    except struct.error:
        raise ValueError("the metadata of a record batch are damaged") from None


def _field(metadata: pa.Buffer, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table is, from the table on; 0 where it has no such field."""
    fields = table - struct.unpack_from("<i", metadata, table)[0]
    num_bytes = struct.unpack_from("<H", metadata, fields)[0]
    at = 4 + 2 * number
    return int(struct.unpack_from("<H", metadata, fields + at)[0]) if at < num_bytes else 0
