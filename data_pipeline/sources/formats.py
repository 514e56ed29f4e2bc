"""Which files are read, by their extensions, and the count of those that are not."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from data_pipeline.config import Kind
from data_pipeline.sources.parsers import columnar, json_arrays, json_lines, notebooks, tables, text_files
from data_pipeline.sources.streams import Compression

FORMATS = {
    source_format.name: source_format
    for source_format in (
        text_files.TEXT,
        text_files.HTML,
        text_files.TOPICS,
        json_lines.JSON_LINES,
        json_arrays.JSON_ARRAY,
        notebooks.NOTEBOOK,
        tables.CSV,
        tables.TSV,
        columnar.PARQUET,
        columnar.ARROW,
    )
}
_ARCHIVES: dict[str, tuple[str, Kind | None]] = {".tar": ("tar", None), ".zip": ("zip", None)}
_BY_EXTENSION = {
    extension: (source_format.name, kind)
    for source_format in FORMATS.values()
    for extension, kind in source_format.extensions.items()
} | _ARCHIVES
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
_SHORT_FORMS = {".tgz": (".tar", ".gz"), ".txz": (".tar", ".xz"), ".tbz2": (".tar", ".bz2"), ".tzst": (".tar", ".zst")}

_CODE = [extension for extension, kind in text_files.TEXT.extensions.items() if kind == "code"]
UNDERSTOOD = (
    f"{', '.join(name for name in _BY_EXTENSION if name not in _CODE)}, .json with an array of objects or with JSON Lines, "
    f"and source code ({', '.join(_CODE[:3])}, …), "
    "each also with .gz, .zst, .xz or .bz2, alone or in a .tar or .zip"
)


@dataclass(frozen=True, slots=True)
class Shape:
    format: str  # a name in `FORMATS`, or `tar` or `zip`
    compression: Compression
    kind: Kind | None  # None for records and archives, whose extension does not tell the kind of text


def shape_of(name: str) -> Shape | None:
    """Return how a file is read, by its extensions in upper or lower case; None if no format has them."""
    suffixes = _suffixes(name)
    suffixes[-1:] = _SHORT_FORMS.get(suffixes[-1], suffixes[-1:]) if suffixes else []
    compression: Compression = _COMPRESSIONS.get(suffixes[-1], "none") if suffixes else "none"
    extension = "".join(suffixes[-2:-1] if compression != "none" else suffixes[-1:])
    if extension == ".json" and compression != "none":
        extension = ".jsonl"  # C4, Dolma and others name JSON Lines so; an uncompressed .json is rarely text
    file_format, kind = _BY_EXTENSION.get(extension, (None, None))
    if file_format is None or (file_format == "zip" and compression != "none"):
        return None
    return Shape(file_format, compression, kind)


def shape_of_json(first: bytes) -> Shape | None:
    """Return how a `.json` file that begins with these bytes is read; None if it holds one value, such as settings."""
    if json_arrays.is_array(first):
        return Shape(json_arrays.JSON_ARRAY.name, "none", None)
    return Shape(json_lines.JSON_LINES.name, "none", None) if json_lines.is_lines(first) else None


def _suffixes(name: str) -> list[str]:
    return [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]


def is_hidden(path: str) -> bool:
    """Whether a name in the path begins with a dot. Such files are not read."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def printable(name: str) -> str:
    """Return a file's name for messages and manifests, with control characters and lone surrogates escaped."""
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in name)


_EXTENSION = re.compile(r"(\.\w[\w+-]{0,11}){1,2}")  # longer ends of names and those with spaces are none: `1. Introduction`
_MAX_EXTENSIONS = 1000  # counted separately, because an archive from a stranger can have a million


class IgnoredReason(StrEnum):
    UNKNOWN_FORMAT = "unknown-format"  # its extension is not that of a format that is read
    UNKNOWN_MEMBER = "unknown-format-in-archive"  # the same for a file in an archive
    EMPTY = "empty"
    OVER_LIMIT = "over-limit"  # the files before it have reached the limit of its source in bytes
    README = "readme"  # at the top of the folder
    CACHE = "cache"  # Hugging Face's datasets library keeps it beside the data
    LINK = "link"
    TEST_SPLIT = "test-split"  # of a data set that names its splits
    STALE = "stale"  # in a saved data set, but not one of the files that it names


class IgnoredFiles:
    """Counts files that are not read, by reason and extension, except hidden ones and those that a preparation has written."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}

    def add(self, reason: IgnoredReason, path: str) -> None:
        count_extension(path, self._counts.setdefault(reason.value, {}))

    def report(self, members: Mapping[str, int]) -> dict[str, dict[str, int]]:
        counts = self._counts | ({IgnoredReason.UNKNOWN_MEMBER.value: members} if members else {})
        return {reason: dict(extensions) for reason, extensions in counts.items()}


def count_extension(path: str, counts: MutableMapping[str, int]) -> None:
    name = extension_shown(path)
    name = name if name in counts or len(counts) < _MAX_EXTENSIONS else "other"
    counts[name] = counts.get(name, 0) + 1


def extension_shown(path: str) -> str:
    """Return the extension of a file's name in lower case; of a compressed file, its last two extensions."""
    suffixes = _suffixes(path)
    extension = "".join(suffixes if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])
    return extension if _EXTENSION.fullmatch(extension) else "without an extension"
