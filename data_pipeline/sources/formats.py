"""What a file's name says about it: how it is laid out, how it is compressed, and what sort of text it holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from data_pipeline.config import Kind

__all__ = ["UNDERSTOOD", "Compression", "Format", "Shape", "extension_of", "is_hidden", "printable", "shape_of"]

Format = Literal["text", "html", "jsonl", "csv", "tsv", "parquet", "topics", "tar", "zip"]
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
    ".tar": ("tar", None),
    ".zip": ("zip", None),
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
_SHORT_FORMS = {".tgz": (".tar", ".gz"), ".txz": (".tar", ".xz"), ".tbz2": (".tar", ".bz2"), ".tzst": (".tar", ".zst")}

UNDERSTOOD = (
    f"{', '.join(name for name in _FORMATS if name not in _CODE)} and source code ({', '.join(_CODE[:3])}, …), "
    "each also with .gz, .zst, .xz or .bz2, alone or in a .tar or .zip"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a file of some name is read."""

    format: Format
    compression: Compression
    kind: Kind | None
    """None where the name does not say it: records hold what they hold, and the members of an archive have names of their own."""

    @property
    def is_archive(self) -> bool:
        """Whether it holds files of its own."""
        return self.format in ("tar", "zip")


def shape_of(name: str) -> Shape | None:
    """What the extensions of a file's name say, in any case; None where they say nothing that is understood."""
    suffixes = _suffixes(name)
    suffixes[-1:] = _SHORT_FORMS.get(suffixes[-1], suffixes[-1:]) if suffixes else []
    compression: Compression = _COMPRESSIONS.get(suffixes[-1], "none") if suffixes else "none"
    extension = "".join(suffixes[-2:-1] if compression != "none" else suffixes[-1:])
    file_format, kind = _FORMATS.get(extension, (None, None))
    if file_format is None or (file_format == "zip" and compression != "none"):
        return None
    return Shape(file_format, compression, kind)


def extension_of(name: str) -> str:
    """The extension of a file's name in lower case, with the one before it where the last one is that of a compression."""
    suffixes = _suffixes(name)
    return "".join(suffixes if suffixes and suffixes[-1] in _COMPRESSIONS else suffixes[-1:])


def _suffixes(name: str) -> list[str]:
    return [suffix.lower() for suffix in PurePosixPath(name).suffixes[-2:]]


def is_hidden(path: str) -> bool:
    """Whether a file, or a folder on the way to it, has a name that begins with a dot: such files are no text to train on."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def printable(name: str) -> str:
    """A file's name as it may stand in a message and a manifest: no control characters, and no half of a surrogate pair.

    File names are bytes, and those of strangers can hold whatever confuses a terminal or cannot be written as UTF-8.
    """
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in name)
