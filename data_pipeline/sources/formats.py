from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from data_pipeline.config import Kind
from data_pipeline.sources.parsers import columnar, json_lines, tables, text_files
from data_pipeline.sources.streams import Compression

FORMATS = {
    source_format.name: source_format
    for source_format in (
        text_files.TEXT,
        text_files.HTML,
        text_files.TOPICS,
        json_lines.JSON_LINES,
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

_CODE = [extension for extension, (_, kind) in _BY_EXTENSION.items() if kind == "code"]
UNDERSTOOD = (
    f"{', '.join(name for name in _BY_EXTENSION if name not in _CODE)}, .json.gz with JSON Lines inside, "
    f"and source code ({', '.join(_CODE[:3])}, …), "
    "each also with .gz, .zst, .xz or .bz2, alone or in a .tar or .zip"
)


@dataclass(frozen=True, slots=True)
class Shape:
    format: str  # a name in `FORMATS`, or `tar` or `zip`
    compression: Compression
    kind: Kind | None  # None for records and archives, whose extension does not tell the kind of text

    @property
    def is_archive(self) -> bool:
        return self.format not in FORMATS


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


def extension_of(name: str) -> str:
    """Return the extension of a file's name in lower case; of a compressed file, its last two extensions."""
    suffixes = _suffixes(name)
    return "".join(suffixes if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])


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
