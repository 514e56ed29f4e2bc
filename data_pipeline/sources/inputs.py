from __future__ import annotations

import glob
import logging
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath

from common.errors import ConfigError, SourceError
from common.files import UnusableFileError, digest_bytes, open_input, read_input, sealed, unsealed, write_atomic
from common.paths import named_mount
from common.redaction import redacted
from common.text import some_of
from data_pipeline.config import BUILTIN, Kind, PrepareConfig
from data_pipeline.dataset.layout import FOLDERS, MANIFEST, SINGLE_FILES, is_written_by_prepare
from data_pipeline.dataset.manifest import BUILTIN_SOURCES
from data_pipeline.sources.formats import (
    FORMATS,
    UNDERSTOOD,
    IgnoredFiles,
    IgnoredReason,
    Shape,
    extension_shown,
    is_hidden,
    printable,
    shape_of,
    shape_of_json,
)
from data_pipeline.sources.listing import Found, Listing, Location, found_here, is_url
from data_pipeline.sources.named_splits import NamedSplit, named_splits, stale_files
from data_pipeline.sources.parsers.text_files import TOPICS
from data_pipeline.sources.storage import digest, list_files
from data_pipeline.sources.streams import Compression, StreamError, as_utf8

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_SHA256 = re.compile("sha256:[0-9a-f]{64}")
_MAX_KNOWN_BYTES = 512 << 20
_FORMAT_OF_MANIFEST = b'"format":"packed-rows/'
_CACHE_OF_DATASETS = re.compile(r"cache-[0-9a-f].*\.arrow")
_FILES_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_README_OF_PLACEHOLDER = b"# Put your text here\n"
_MAX_README_BYTES = 1 << 20
# Tests and bundled programs are repetitive; site-packages is not the standard library and differs between machines.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}
_DIVISIBLE = {source_format.name for source_format in FORMATS.values() if source_format.is_divisible}


@dataclass(frozen=True, kw_only=True)
class InputFile(Found):
    """A file of a source. Source, path and content identify it on every machine; `location` and the stamps are local."""

    source: str
    format: str
    compression: Compression
    kind: Kind | None  # if the settings of the source or the file name state it
    split: NamedSplit | None = None  # if the data set says it

    @property
    def identity(self) -> dict[str, str | int]:
        algorithm = "sha256" if self.checksum.startswith("sha256:") else "checksum"
        return {"source": self.source, "path": self.path, "bytes": self.bytes, algorithm: self.checksum}


@dataclass(frozen=True)
class Part:
    file: InputFile
    start: int
    end: int


@dataclass(frozen=True)
class _Source:
    name: str | None  # None if the source is named after its folder or file
    paths: tuple[str, ...]
    kind: Kind | None
    max_bytes: int | None


def find_inputs(config: PrepareConfig, known_digests: Path, ignored: IgnoredFiles | None = None) -> tuple[InputFile, ...]:
    """Return all files with digests, by source and path. A file with the size and times in `known_digests` is not read again."""
    ignored = ignored or IgnoredFiles()
    found = list(_find_all(config, ignored))
    if not found:  # `if_empty` allows it, or `_find_named` would have raised an error
        named = ", ".join(map(_shown, config.sources)) or "no source"
        logger.warning("no text in %s: the built-in corpus (Python's standard library) is used instead", named)
        found = [*_find_builtin(_Source(None, (), None, config.limits.max_bytes_per_source), ignored)]
    known = _read_known(known_digests)

    def identify(file: InputFile) -> InputFile:
        if file.checksum:
            return file
        remembered = None if file.location.store else known.get(_key(file))
        return replace(file, checksum=remembered or digest(file.location, file.bytes, config.limits))

    with ThreadPoolExecutor(config.workers or 8) as pool:  # hashing releases the interpreter lock
        return tuple(pool.map(identify, found))


def remember_digests(inputs: Sequence[InputFile], path: Path) -> None:
    write_atomic(path, sealed({_key(file): file.checksum for file in inputs if not file.location.store}))


def _find_all(config: PrepareConfig, ignored: IgnoredFiles) -> Iterator[InputFile]:
    taken = {*BUILTIN_SOURCES, *config.source}
    for source in _sources(config):
        if source.name is None and source.paths == (BUILTIN,):
            yield from _find_builtin(source, ignored)
            continue
        files: list[InputFile] = []
        name = source.name
        folders: set[str] = set()
        for named in source.paths:
            root, usable = _find_named(named, source, config, ignored)
            name = name or _unique(_name_after(root), taken)
            # With several folders each path begins with its folder, because two of them may hold files with the same name.
            folder = f"{_unique(_name_after(root), folders)}/" if len(source.paths) > 1 else ""
            usable = _with_splits(usable, root, named, config, ignored)
            files += [replace(file, source=name, path=folder + file.path) for file in usable]
        yield from _first_bytes(files, source.max_bytes, ignored)


def _sources(config: PrepareConfig) -> Iterator[_Source]:
    limit = config.limits.max_bytes_per_source
    for named in config.sources:
        yield _Source(None, (named,), None, limit)
    for name, own in config.source.items():
        if not _NAME.fullmatch(name) or name in BUILTIN_SOURCES:
            raise ConfigError(
                f"source.{name}: this name cannot be used; write another one with at most 64 lower-case letters, digits, _ and -"
            )
        yield _Source(name, own.paths, own.kind, limit if own.max_bytes is None else own.max_bytes)


def _find_named(named: str, source: _Source, config: PrepareConfig, ignored: IgnoredFiles) -> tuple[str, list[InputFile]]:
    """Return the root that a path or URL names, and the text files in it. The caller fills in their source."""
    if named == BUILTIN:
        return BUILTIN, list(_find_builtin(replace(source, max_bytes=None), ignored))
    listing = list_files(named, config.limits)
    if listing.is_folder and not is_url(named) and Path(listing.root).resolve() == config.output.resolve():
        raise ConfigError(f"source {named} is the output folder; choose another --output; a folder inside the source is possible")
    if not listing.files and not listing.unfollowed and not listing.is_folder:
        is_pattern = glob.has_magic(_shown(named))
        remedy = "no file matches; check the pattern" if is_pattern else "no such file or folder; check the path"
        raise SourceError(f"source {_shown(named)}: {remedy}, or use the word {BUILTIN} for the built-in corpus")
    unprepared = list(_not_prepared(listing.files, config.output))
    visible = [file for file in unprepared if not (listing.is_folder and is_hidden(file.path))]
    if num_prepared := len(listing.files) - len(unprepared):
        logger.warning("source %s: %d files that a preparation has written are not read", _shown(named), num_prepared)
    root = None if is_url(named) else Path(listing.root).absolute()
    files = list(_texts(visible, root if root is None or root.is_dir() else root.parent, ignored, is_folder=listing.is_folder))
    shapes = {file: _shape_of(file) for file in files}
    usable = [_input(file, shape, source) for file, shape in shapes.items() if shape is not None]
    unknown = [file for file, shape in shapes.items() if shape is None]
    # The built-in corpus may replace an empty placeholder folder.
    may_be_empty = config.if_empty == "builtin" and not is_url(named) and is_placeholder(Path(named.removeprefix("file://")))
    if not any(file.bytes for file in usable) and not may_be_empty:
        raise SourceError(_explain_no_text(_shown(named), listing, unknown, len(usable), num_prepared))
    if unknown:
        logger.warning(
            "source %s: %d of %d files ignored (%s)%s",
            _shown(named),
            len(unknown),
            len(files),
            _count_extensions(unknown),
            "".join(f"; {command}" for command in _converters(unknown)),
        )
    for file in unknown:
        ignored.add(IgnoredReason.UNKNOWN_FORMAT, file.path)
    for path in chain.from_iterable(links.paths for links in listing.unfollowed):
        ignored.add(IgnoredReason.LINK, path)
    return listing.root, usable


def _shape_of(file: Found) -> Shape | None:
    if (shape := shape_of(file.path)) is None and file.path.lower().endswith(".json") and not file.location.store:
        try:
            with open_input(Path(file.location.name)) as content:
                shape = shape_of_json(next(as_utf8(iter((content.read(_PEEKED_BYTES),))), b""))
        except (OSError, UnusableFileError, StreamError):
            pass  # reading it says why, if it is read at all
    return shape


def _with_splits(files: list[InputFile], root: str, named: str, config: PrepareConfig, ignored: IgnoredFiles) -> list[InputFile]:
    """Return the files with the splits that their names or a card give them, without those of a test split."""
    if not config.split.by_name:
        return files
    known = {file.path: FORMATS.get(file.format) for file in files if file.kind != "code"}
    records = {path: found is None or found.markup == "records" for path, found in known.items()}  # or an archive
    splits = named_splits(records, None if is_url(root) else Path(root))
    tests = [file for file in files if splits.get(file.path) == "test"]
    for file in tests:
        ignored.add(IgnoredReason.TEST_SPLIT, file.path)
    if tests:
        logger.warning(
            "source %s: %d of %d files are not read, because they are the test split of the data set (%s); set split.by_name to "
            "false to read them as training text",
            _shown(named),
            len(tests),
            len(files),
            some_of([printable(file.path) for file in tests], _SHOWN_SPLIT),
        )
    if validation := [printable(path) for path, split in splits.items() if split == "validation"]:
        logger.info("source %s: its validation split is held out: %s", _shown(named), some_of(validation, _SHOWN_SPLIT))
    return [replace(file, split=splits.get(file.path)) for file in files if splits.get(file.path) != "test"]


def is_placeholder(folder: Path) -> bool:
    """Whether a folder has only files of the folder `text` of a fresh checkout."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names <= {"README.md", ".gitignore"}:
        return False
    try:
        return "README.md" not in names or read_input(folder / "README.md", _MAX_README_BYTES).startswith(_README_OF_PLACEHOLDER)
    except UnusableFileError:
        return False


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def code_files(library: Path) -> list[Path]:
    return [
        path
        for path in library.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts) and not path.name.startswith("_sysconfigdata")
    ]


def _find_builtin(source: _Source, ignored: IgnoredFiles) -> Iterator[InputFile]:
    library = standard_library()
    code, manual = sorted(code_files(library)), library / "pydoc_data" / "topics.py"
    if not code or not manual.is_file():
        raise SourceError(
            f"the built-in corpus: Python's standard library in {library} has no source text; set --sources to other files"
        )
    parts = (code, Shape("text", "none", "code")), ([manual], Shape(TOPICS.name, "none", "prose"))
    for name, (paths, shape) in zip(BUILTIN_SOURCES, parts, strict=True):
        found = [found_here(library, path) for path in paths]
        yield from _first_bytes([_input(file, shape, replace(source, name=name)) for file in found], source.max_bytes, ignored)


def _input(file: Found, shape: Shape, source: _Source) -> InputFile:
    kind = source.kind or shape.kind
    return InputFile(source=source.name or "", format=shape.format, compression=shape.compression, kind=kind, **vars(file))


def _texts(files: Sequence[Found], root: Path | None, ignored: IgnoredFiles, *, is_folder: bool) -> Iterator[Found]:
    """Yield the files below `root`, which is None if they are in a store, without those that hold no text of their source."""
    stale = set() if root is None else stale_files([file.path for file in files], root)
    saved = {file.path.rpartition("/")[0] for file in files if file.path.rpartition("/")[2] == "dataset_info.json"}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if is_folder and file.path == "README.md":
            ignored.add(IgnoredReason.README, file.path)
        elif file.path in stale:
            ignored.add(IgnoredReason.STALE, file.path)
        elif (folder in saved and _CACHE_OF_DATASETS.fullmatch(name)) or name in _FILES_OF_DATASETS:
            ignored.add(IgnoredReason.CACHE, file.path)
        else:
            yield file


def _not_prepared(files: Iterable[Found], output: Path) -> Iterator[Found]:
    is_prepared = cache(_holds_prepared_data)
    real_output = output.resolve()
    real_folders: dict[str, Path] = {}  # a cache: there are far fewer folders than files, and each `resolve` reads the disk
    for file in files:
        if not file.location.store:
            folder, _, name = file.location.name.rpartition("/")
            if folder not in real_folders:
                real_folders[folder] = Path(folder or "/").resolve()
            place = real_folders[folder] / name
            if place.is_relative_to(real_output) and is_written_by_prepare(place.relative_to(real_output)):
                continue
            parts = Path(file.location.name).parts
            names = [number for number, part in enumerate(parts) if part in FOLDERS]
            names += [len(parts) - 1] if parts[-1] in SINGLE_FILES else []
            if any(is_prepared(Path(*parts[:number])) for number in names):  # a folder that could have been its output
                continue
        yield file


def _holds_prepared_data(folder: Path) -> bool:
    try:
        with open_input(folder / MANIFEST, below=folder) as file:
            before = b""
            while block := file.read(1 << 20):
                if _FORMAT_OF_MANIFEST in before + block:
                    return True
                before = block[-len(_FORMAT_OF_MANIFEST) :]
    except (OSError, UnusableFileError):
        pass
    return False


def _shown(named: str) -> str:
    return str(Location(named, named)) if is_url(named) else redacted(named)


def _name_after(root: str) -> str:
    last = PurePosixPath(root).name if is_url(root) else Path(root).resolve().name
    return re.sub(r"[^a-z0-9_-]+", "-", (last.split(".")[0] or last).lower()).strip("-")[:64] or "text"


def _unique(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    taken.add(candidate)
    return candidate


def _first_bytes(files: Iterable[InputFile], max_bytes: int | None, ignored: IgnoredFiles) -> Iterator[InputFile]:
    used = 0
    for file in sorted(files, key=lambda file: (file.path, file.location.name)):
        if not file.bytes:
            ignored.add(IgnoredReason.EMPTY, file.path)
        elif max_bytes is not None and used >= max_bytes:
            ignored.add(IgnoredReason.OVER_LIMIT, file.path)
        else:
            yield file
            used += file.bytes


def _read_known(path: Path) -> dict[str, str]:
    """Return the digests that `remember_digests` wrote, or none if the file is damaged, because they only save time."""
    try:
        known = unsealed(read_input(path, _MAX_KNOWN_BYTES, below=path.parent))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is damaged (%s); the input files are read again", path, error)
        return {}
    return {key: checksum for key, checksum in known.items() if _SHA256.fullmatch(str(checksum))}


def _key(file: InputFile) -> str:
    """Return a key that identifies this version of a file. It is a digest, because prepared data must not name local folders."""
    return digest_bytes(f"{file.location}:{file.bytes}:{file.stamp}:{file.status_stamp}".encode(errors="surrogatepass"))


_PANDOC = 'for f in *{0}; do pandoc -t plain --wrap=none "$f" -o "${{f%.*}}.txt"; done'
_CONVERTERS = {
    ".pdf": 'for f in *.pdf; do pdftotext -nopgbrk "$f"; done',
    ".doc": "soffice --headless --convert-to txt:Text *.doc",
    ".ppt": "soffice --headless --convert-to txt:Text *.ppt",
    ".djvu": 'for f in *.djvu; do djvutxt "$f" "${f%.*}.txt"; done',
} | {extension: _PANDOC.format(extension) for extension in (".docx", ".odt", ".epub", ".rtf", ".org", ".textile", ".mediawiki")}
_PEEKED_BYTES = 1 << 16

_SHOWN, _SHOWN_SPLIT = 8, 3  # maximum number of extensions, and of files of a split, in a message


def _explain_no_text(shown: str, listing: Listing, unknown: Sequence[Found], num_empty: int, num_prepared: int) -> str:
    found, remedies = ["no file with text in it"], []
    if unknown:
        found.append(f"{_count_extensions(unknown)} cannot be read")
        remedies.append("; ".join(_converters(unknown)) or "convert these files to text")
    if num_empty:
        found.append(f"{num_empty} file{'s are' if num_empty > 1 else ' is'} empty")
    if num_prepared:
        found.append(
            f"{num_prepared} file{'s were' if num_prepared > 1 else ' was'} written by a preparation and cannot be a source"
        )
    for links in listing.unfollowed:
        found.append(links.found)
        remedies.append(links.remedy)
    if len(found) == 1 and listing.is_folder and not is_url(listing.root):
        is_empty = not any(Path(listing.root).iterdir())
        found.append("it is empty" if is_empty else "files whose names begin with a dot, and a README.md at its top, are not read")
    mount = named_mount(Path(listing.root))
    remedies.append(f"name another folder{f' with {mount}' if mount else ''}")
    *first, last = remedies
    advice = f"{', '.join(first)}, or {last}" if first else last
    return f"source {shown}: {'; '.join(found)}. Formats that are read: {UNDERSTOOD}. To do: {advice}"


def _converters(files: Sequence[Found]) -> list[str]:
    """Return the command of a usual program for each kind of these files from which it makes text."""
    commands = dict.fromkeys(_CONVERTERS.get(extension_shown(file.path), "") for file in files)
    return [f"`{command}` makes text of them" for command in commands if command]


def _count_extensions(files: Sequence[Found]) -> str:
    counts = Counter(extension_shown(file.path) for file in files)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return some_of([f"{count} {name}" for name, count in ordered], _SHOWN)


@dataclass(frozen=True)
class Partition:
    """One range of one file, or several whole files, all from one source."""

    number: int
    parts: tuple[Part, ...]

    @property
    def source(self) -> str:
        return self.parts[0].file.source

    @property
    def bytes(self) -> int:
        return sum(part.end - part.start for part in self.parts)

    @property
    def identity(self) -> dict[str, object]:
        """Entry of the partition in the manifest. With it a document id leads to the bytes of a file."""
        return {
            "source": self.source,
            "parts": [{"path": part.file.path, "start": part.start, "end": part.end} for part in self.parts],
        }


def cut_into_partitions(inputs: Sequence[InputFile], partition_bytes: int) -> tuple[Partition, ...]:
    """Cut large JSON Lines files into ranges, and group all other files, into partitions of about `partition_bytes`, in order."""
    groups: list[list[Part]] = []
    grouped_bytes = 0  # in the last group, to which files may be added; -1 if not
    for file in inputs:
        if file.format in _DIVISIBLE and file.compression == "none" and file.bytes > partition_bytes:
            # A line belongs to the range in which it starts, so a range may start at any offset.
            starts = range(0, file.bytes, partition_bytes)
            groups += ([Part(file, start, min(start + partition_bytes, file.bytes))] for start in starts)
            grouped_bytes = -1
            continue
        is_full = grouped_bytes < 0 or grouped_bytes + file.bytes > partition_bytes
        if not groups or is_full or groups[-1][0].file.source != file.source:
            groups.append([])
            grouped_bytes = 0
        groups[-1].append(Part(file, 0, file.bytes))
        grouped_bytes += file.bytes
    return tuple(Partition(number, tuple(parts)) for number, parts in enumerate(groups))
