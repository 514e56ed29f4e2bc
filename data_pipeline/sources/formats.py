"""Format, compression and kind of text of a file, by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from data_pipeline.config import Kind

__all__ = ["UNDERSTOOD", "Compression", "Format", "Shape", "extension_of", "is_hidden", "printable", "shape_of"]

Format = Literal["text", "html", "jsonl", "csv", "tsv", "parquet", "arrow", "topics", "tar", "zip"]
Compression = Literal["none", "gz", "zst", "xz", "bz2"]

_TEXT = (".txt", ".text", ".md", ".markdown", ".rst")
_CODE = (
    *(".py", ".pyi", ".pyx", ".rb", ".pl", ".pm", ".php", ".lua", ".r", ".jl", ".tcl", ".awk"),
    *(".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".hh", ".m", ".mm", ".cu", ".cuh", ".rs", ".go", ".zig", ".d", ".nim", ".v"),
    *(".java", ".kt", ".kts", ".scala", ".groovy", ".clj", ".cs", ".fs", ".vb", ".swift", ".dart"),
    *(".js", ".mjs", ".cjs", ".jsx", ".ts", ".tsx", ".vue", ".svelte", ".css", ".scss", ".sql", ".proto", ".graphql"),
    *(".hs", ".ml", ".mli", ".ex", ".exs", ".erl", ".el", ".lisp", ".scm", ".rkt"),
    *(".f", ".f90", ".pas", ".ada", ".adb", ".ads", ".asm", ".s", ".vhd", ".sv"),
    *(".sh", ".bash", ".zsh", ".fish", ".ps1", ".bat", ".cmake", ".nix", ".tf"),
)
_FORMATS: dict[str, tuple[Format, Kind | None]] = {
    **dict.fromkeys(_TEXT, ("text", "prose")),
    **dict.fromkeys(_CODE, ("text", "code")),
    **dict.fromkeys((".html", ".htm", ".xhtml"), ("html", "web")),
    **dict.fromkeys((".jsonl", ".ndjson", ".json-lines"), ("jsonl", None)),
    ".csv": ("csv", None),
    ".tsv": ("tsv", None),
    ".parquet": ("parquet", None),
    **dict.fromkeys((".arrow", ".feather"), ("arrow", None)),
    ".tar": ("tar", None),
    ".zip": ("zip", None),
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
_SHORT_FORMS = {".tgz": (".tar", ".gz"), ".txz": (".tar", ".xz"), ".tbz2": (".tar", ".bz2"), ".tzst": (".tar", ".zst")}

UNDERSTOOD = (
    f"{', '.join(name for name in _FORMATS if name not in _CODE)}, .json.gz with JSON Lines inside, "
    f"and source code ({', '.join(_CODE[:3])}, …), "
    "each also with .gz, .zst, .xz or .bz2, alone or in a .tar or .zip"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a file is read."""

    format: Format
    compression: Compression
    kind: Kind | None
    """None for formats of records and for archives, because their extension does not tell the kind of text."""

    @property
    def is_archive(self) -> bool:
        return self.format in ("tar", "zip")


def shape_of(name: str) -> Shape | None:
    """Return how a file is read, by its extensions in upper or lower case; None if no format has them."""
    suffixes = _suffixes(name)
    suffixes[-1:] = _SHORT_FORMS.get(suffixes[-1], suffixes[-1:]) if suffixes else []
    compression: Compression = _COMPRESSIONS.get(suffixes[-1], "none") if suffixes else "none"
    extension = "".join(suffixes[-2:-1] if compression != "none" else suffixes[-1:])
    if extension == ".json" and compression != "none":
        extension = ".jsonl"  # C4, Dolma and others name JSON Lines so; an uncompressed .json is rarely text
    file_format, kind = _FORMATS.get(extension, (None, None))
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
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def printable(name: str) -> str:
    """Return a file's name for messages and manifests, with control characters and lone surrogates escaped."""
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in name)
