"""Which files are read: the sources that the user named, looked up, put in order and identified by content."""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from data_pipeline.config import BUILTIN, PrepareConfig
from data_pipeline.errors import SourceError
from data_pipeline.files import canonical_json, digest_file, write_atomic
from data_pipeline.sources.builtin import code_files, manual_file, standard_library
from data_pipeline.sources.streams import Compression

__all__ = ["EXTENSIONS", "Format", "InputFile", "Part", "find_inputs", "remember_digests"]

logger = logging.getLogger(__name__)

Format = Literal["text", "jsonl", "topics"]

EXTENSIONS: dict[str, Format] = {
    **dict.fromkeys((".txt", ".text", ".md", ".markdown", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json-lines"), "jsonl"),
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
UNDERSTOOD = f"{', '.join(EXTENSIONS)}, each also with .gz or .zst"


@dataclass(frozen=True)
class InputFile:
    """One file of one source. Its identity is source, path and content; `location` and `mtime_ns` are this machine's matter."""

    source: str
    path: str
    """Relative to the source, with forward slashes."""
    location: Path
    format: Format
    compression: Compression
    bytes: int
    mtime_ns: int
    sha256: str = ""

    @property
    def identity(self) -> dict[str, str | int]:
        """What the manifest lists: the same on every machine."""
        return {"source": self.source, "path": self.path, "bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Part:
    """The bytes [start, end) of a file: the documents that begin there."""

    file: InputFile
    start: int
    end: int


def find_inputs(config: PrepareConfig, known_digests: Path) -> tuple[InputFile, ...]:
    """All files to read, in the order of the sources and then of their paths, with the digests of their content.

    `known_digests` is a file written by `remember_digests`: it saves reading a file again whose size and time are unchanged.

    Raises:
        SourceError: a source is missing, or holds no text.
    """
    found = list(_find_all(config))
    if not found and config.if_empty == "builtin":
        named = ", ".join(config.sources) or "no source"
        logger.warning("no text in %s: the built-in corpus (Python's standard library) is used instead", named)
        found = [*_find_builtin(config.limits.max_bytes_per_source)]
    elif not found:
        raise SourceError(f"no text in {', '.join(config.sources)}; what is understood: {UNDERSTOOD}")
    return _with_digests(found, known_digests, config.workers or 8)


def remember_digests(inputs: Sequence[InputFile], path: Path) -> None:
    """Keeps the digests of the inputs, so that `find_inputs` need not read unchanged files again."""
    write_atomic(path, canonical_json({_key(file): file.sha256 for file in inputs}))


def _find_all(config: PrepareConfig) -> Iterator[InputFile]:
    taken: set[str] = set()
    for named in config.sources:
        if named == BUILTIN:
            yield from _find_builtin(config.limits.max_bytes_per_source)
            continue
        root, files = _resolve(named, tolerate_missing=config.if_empty == "builtin")
        name = _unique(_source_name(root), taken)
        usable = [file for path in files if (file := _recognise(name, root, path)) is not None]
        _warn_of_ignored(named, files, usable)
        if not usable and config.if_empty == "error":
            raise SourceError(f"source {named}: no file with text in it{_seen(files)}; what is understood: {UNDERSTOOD}")
        yield from _first_bytes(usable, config.limits.max_bytes_per_source)


def _find_builtin(max_bytes: int | None) -> Iterator[InputFile]:
    library = standard_library()
    code, manual = sorted(code_files(library)), manual_file(library)
    if not code or not manual.is_file():
        raise SourceError(
            f"the built-in corpus: Python's standard library in {library} has no source text; name --sources of your own"
        )
    yield from _first_bytes([_input("stdlib-code", library, path, "text") for path in code], max_bytes)
    yield from _first_bytes([_input("stdlib-manual", library, manual, "topics")], max_bytes)


def _resolve(named: str, *, tolerate_missing: bool) -> tuple[Path, list[Path]]:
    """The folder that paths are relative to, and all files of a source in it."""
    path = Path(named)
    if path.is_dir():
        return path, [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path))]
    if path.is_file():
        return path, [path]
    if glob.has_magic(named):
        folder = Path(*_before_magic(path.parts))
        files = [Path(file) for file in glob.glob(named, recursive=True) if Path(file).is_file()]  # noqa: PTH207 - absolute patterns
        if files or tolerate_missing:
            return folder, files
        raise SourceError(f"source {named}: no file matches; check the pattern")
    if tolerate_missing:
        return path, []
    raise SourceError(f"source {named}: no such file or folder; check the path, or use the word {BUILTIN} for the built-in corpus")


def _before_magic(parts: Sequence[str]) -> Iterator[str]:
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def _is_hidden(relative: Path) -> bool:
    """Dot files, and the README that explains the folder, are no text to train on."""
    return any(part.startswith(".") for part in relative.parts) or str(relative) == "README.md"


def _recognise(source: str, root: Path, path: Path) -> InputFile | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    extension = "".join(suffixes[-2:-1] if compression else suffixes[-1:])
    file_format = EXTENSIONS.get(extension)
    return None if file_format is None else _input(source, root, path, file_format, compression or "none")


def _input(source: str, root: Path, path: Path, file_format: Format, compression: Compression = "none") -> InputFile:
    status = path.stat()
    relative = path.name if path == root else path.relative_to(root).as_posix()
    return InputFile(source, relative, path.absolute(), file_format, compression, status.st_size, status.st_mtime_ns)


def _source_name(root: Path) -> str:
    stem = root.resolve().name.split(".")[0] or root.resolve().name
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-") or "text"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken or candidate in ("stdlib-code", "stdlib-manual"):
        candidate, number = f"{name}-{number}", number + 1
    taken.add(candidate)
    return candidate


def _first_bytes(files: Iterable[InputFile], max_bytes: int | None) -> Iterator[InputFile]:
    """The files in name order, as long as those before have not used up `max_bytes`. Empty files hold no document."""
    used = 0
    for file in sorted(files, key=lambda file: file.path):
        if max_bytes is not None and used >= max_bytes:
            return
        if file.bytes:
            yield file
            used += file.bytes


def _warn_of_ignored(named: str, files: Sequence[Path], usable: Sequence[InputFile]) -> None:
    if len(usable) < len(files):
        logger.warning(
            "source %s: %d of %d files ignored%s", named, len(files) - len(usable), len(files), _seen(files, known=False)
        )


def _seen(files: Sequence[Path], *, known: bool = True) -> str:
    """The extensions that were met, as a clause of a message."""
    extensions = sorted({"".join(file.suffixes[-2:]) or file.name for file in files})
    if not known:
        extensions = [name for name in extensions if not any(name.endswith((e, f"{e}.gz", f"{e}.zst")) for e in EXTENSIONS)]
    shown = ", ".join(extensions[:8]) + (", …" if len(extensions) > 8 else "")
    return f" ({shown})" if shown else ""


def _with_digests(files: Sequence[InputFile], known_digests: Path, threads: int) -> tuple[InputFile, ...]:
    known = _read_known(known_digests)

    def digest(file: InputFile) -> InputFile:
        return replace(file, sha256=known.get(_key(file)) or digest_file(file.location))

    with ThreadPoolExecutor(threads) as pool:  # hashing releases the interpreter lock
        return tuple(pool.map(digest, files))


def _read_known(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # it only saves time
    return known if isinstance(known, dict) else {}


def _key(file: InputFile) -> str:
    return f"{file.location}:{file.bytes}:{file.mtime_ns}"
