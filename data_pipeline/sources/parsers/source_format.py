"""What a format declares, and what its parser gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from data_pipeline.config import Kind, PrepareConfig
from data_pipeline.documents import Document, Rejection
from data_pipeline.sources.parsers.decoding import Origin, is_chat
from data_pipeline.sources.streams import Budget, Readable

__all__ = ["Content", "SourceFormat"]


@dataclass(frozen=True)
class Content:
    """The content of a file, or of a file in an archive. `blocks` and `file` can be read once, and only one of them."""

    origin: Origin
    config: PrepareConfig
    blocks: Iterator[bytes] = field(repr=False)
    """The decompressed bytes, from the byte before `start` on if there is one."""
    budget: Budget
    """For data that the parser decompresses itself."""
    file: Readable | None = None
    """The file itself for random access; None if it is compressed or in an archive."""
    num_bytes: int = 0
    start: int = 0
    """Only documents that begin in [start, end) are read, if the format is divisible."""
    end: int | None = None
    border: int = 0
    """The offset in bytes at which a split by position cuts the file. No document crosses it."""


@dataclass(frozen=True)
class SourceFormat:
    """A format of input files. `formats` lists them all."""

    name: str
    extensions: Mapping[str, Kind | None]
    """The kind of text for each extension; None if the extension does not tell it."""
    read: Callable[[Content], Iterator[Document | Rejection]]
    markup: Literal["plain", "html", "records"] = "plain"
    """The markup of the text. Documents that are records with fields have the one that the settings say."""
    is_divisible: bool = False
    """Whether a part of a file can be read by itself."""

    def origin(self, path: str, kind: Kind | None, config: PrepareConfig) -> Origin:
        """Return the origin of a file's documents. HTML is of kind web, unless the source sets another kind."""
        if self.markup != "records":
            markup: Literal["plain", "html", "chat"] = self.markup
        else:
            markup = "chat" if is_chat(config.records, config.chat) else config.records.markup
        return Origin(path, kind or ("web" if markup == "html" else "prose"), markup)
