from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from data_pipeline.config import Kind, PrepareConfig
from data_pipeline.documents import Document, Rejection
from data_pipeline.sources.parsers.decoding import Origin, is_chat
from data_pipeline.sources.streams import Budget, Readable


@dataclass(frozen=True)
class Content:
    """`blocks` and `file` can be read once, and only one of them."""

    origin: Origin
    config: PrepareConfig
    blocks: Iterator[bytes] = field(repr=False)  # decompressed, from the byte before `start` on if there is one
    budget: Budget  # for data that the parser decompresses itself
    file: Readable | None = None  # for random access; None if it is compressed or in an archive
    num_bytes: int = 0
    start: int = 0  # only documents that begin in [start, end) are read, if the format is divisible
    end: int | None = None
    border: int = 0  # the offset in bytes at which a split by position cuts the file; no document crosses it


@dataclass(frozen=True)
class SourceFormat:
    name: str
    extensions: Mapping[str, Kind | None]  # the kind of text for each; None if the extension does not tell it
    read: Callable[[Content], Iterator[Document | Rejection]]
    markup: Literal["plain", "html", "records"] = "plain"  # of the text; documents from records have that of the settings
    is_divisible: bool = False  # whether a part of a file can be read by itself

    def origin(self, path: str, kind: Kind | None, config: PrepareConfig) -> Origin:
        """Return the origin of a file's documents. HTML is of kind web, unless the source sets another kind."""
        if self.markup != "records":
            markup: Literal["plain", "html", "chat"] = self.markup
        else:
            markup = "chat" if is_chat(config.records, config.chat) else config.records.markup
        return Origin(path, kind or ("web" if markup == "html" else "prose"), markup)
