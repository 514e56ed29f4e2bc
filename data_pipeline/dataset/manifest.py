"""The manifest of prepared data: a digest of each file, and one root digest. It has no time, machine or absolute path."""

from __future__ import annotations

import errno
import json
import os
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from common.command_line import command_text
from common.errors import PreparedDataError, SourceError
from common.files import UnusableFileError, canonical_json, digest_bytes, digest_stream, open_input, read_input
from common.text import visible
from data_pipeline.config import cleaning_of, content_settings, named_files, shaping_settings
from data_pipeline.dataset.layout import MANIFEST, PUBLISHED, REFERENCE
from data_pipeline.dataset.locks import reading
from data_pipeline.tokenizer.base import MAX_TOKENIZER_BYTES, MAX_VOCAB_SIZE

BUILTIN_SOURCES = ("stdlib-code", "stdlib-manual")  # Python's standard library, and its manual
FAMILY = "packed-rows/"
FORMAT = f"{FAMILY}2"
MASKED_FORMAT = f"{FAMILY}3"  # shards and tables may have a column `loss_runs`
_FORMATS = (FORMAT, MASKED_FORMAT)
MAX_MANIFEST_BYTES = 512 << 20  # enough for about a million input files
MAX_REFERENCE_BYTES = 4 << 30  # more than a model has with the highest `quality.reference_bits`
MAX_ROW_LENGTH = 1 << 20
_MAX_SHARD_ROWS = (1 << 31) - 1  # the offsets of the lists in a shard are int32
_MAX_ROWS = 1 << 40  # the order of training rows is defined up to this number
_MAX_FILE_BYTES = 1 << 62
_MAX_PLACE_CHARS = 80


class OtherFormatError(PreparedDataError):
    """Another version of this program has written the manifest."""


def _checked_text(value: str) -> str:
    if not value.isprintable():
        raise ValueError("a text in one line is expected")
    return value


def _checked_path(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute() or str(path) != value or not path.name or {".", ".."} & {*path.parts}:
        raise ValueError("the path of a file inside the folder of the manifest is expected")
    return value


def _checked_input(value: dict[str, Any]) -> dict[str, Any]:
    has_texts = isinstance(value.get("source"), str) and isinstance(value.get("path"), str)
    if not has_texts or type(value.get("bytes")) is not int or not 0 <= value["bytes"] <= _MAX_FILE_BYTES:
        raise ValueError("an object with source, path and bytes is expected")
    return value


def _checked_partition(value: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(value.get("source"), str) and isinstance(value.get("parts"), list)):
        raise ValueError("an object with source and parts is expected")
    return value


def _checked_totals(value: dict[str, Any]) -> dict[str, Any]:
    sources = value.get("sources", {})
    reports = sources.values() if isinstance(sources, dict) else [None]
    if not all(isinstance(report, dict) and isinstance(report.get("kind"), str | None) for report in reports):
        raise ValueError("an object is expected in which sources has an object for each source, with its kind as a text")
    return value


_Text = Annotated[str, Field(max_length=1024), AfterValidator(_checked_text)]
_Path = Annotated[_Text, AfterValidator(_checked_path)]
_Digest = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
_Bytes = Annotated[int, Field(ge=0, le=_MAX_FILE_BYTES)]


@dataclass(frozen=True)
class ShardEntry:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    path: _Path  # relative to the manifest, such as `train/stdlib-code-00000.arrow`
    split: Literal["train", "val"]
    source: str
    rows: Annotated[int, Field(ge=0, le=_MAX_SHARD_ROWS)]
    tokens: _Bytes  # number of tokens without padding
    targets: _Bytes  # tokens with a loss, except the first of each document in a row
    bytes: _Bytes
    sha256: _Digest


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. The types are those of a file, which may come from a stranger."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    fingerprint: _Text  # digest of the settings and the input. Equal fingerprints mean equal prepared data.
    row_length: Annotated[int, Field(ge=1, le=MAX_ROW_LENGTH)]
    vocab_size: Annotated[int, Field(ge=1, le=MAX_VOCAB_SIZE)]
    token_type: Annotated[str, Field(pattern="^uint(16|32)$")]
    tokenizer_kind: _Text
    tokenizer_digest: _Text
    sources: tuple[Annotated[str, Field(pattern="^[a-z0-9_-]{1,64}$")], ...]
    shards: tuple[ShardEntry, ...]
    files: dict[_Path, _Digest]  # digest of every other file by name: tokenizer, report and tables
    inputs: tuple[Annotated[dict[str, Any], AfterValidator(_checked_input)], ...]
    partitions: tuple[Annotated[dict[str, Any], AfterValidator(_checked_partition)], ...]
    """Source, files and byte ranges of every partition. The id of a document contains an index into this list (see `documents`)."""
    config: dict[str, Any]
    totals: Annotated[dict[str, Any], AfterValidator(_checked_totals)]
    root_digest: str = field(default="")
    format: str = FORMAT

    @property
    def is_builtin(self) -> bool:
        """Whether all sources come with Python, so that the data can be prepared again without a path."""
        return set(self.sources) <= {*BUILTIN_SOURCES}

    @property
    def digests(self) -> dict[str, str]:
        return {shard.path: shard.sha256 for shard in self.shards} | self.files

    @property
    def shaping(self) -> dict[str, Any]:
        """Only these may be used to prepare the data again."""
        return shaping_settings(self.config)

    @property
    def content_settings(self) -> dict[str, Any]:
        return content_settings(self.config)

    @property
    def cleaning(self) -> list[dict[str, Any]]:
        return cleaning_of(self.config, self.sources)

    @property
    def named_files(self) -> list[str]:
        """The manifest has only the digests of these files."""
        return named_files(self.config)

    @property
    def sizes(self) -> dict[str, int]:
        return {shard.path: shard.bytes for shard in self.shards}

    @property
    def has_pairs(self) -> bool:
        """Whether the documents are preference pairs: two consecutive segments of a row each, the better answer first."""
        sources = self.config.get("source")
        own = [one.get("records") for one in sources.values() if isinstance(one, dict)] if isinstance(sources, dict) else []
        records = [one for one in (self.config.get("records"), *own) if isinstance(one, dict)]
        return any(one.get("chosen_field") is not None for one in records)

    def sealed(self) -> tuple[Manifest, bytes]:
        """Return this manifest with its root digest, parsed from the bytes of its file as a reader would, and these bytes."""
        content = {name: value for name, value in asdict(self).items() if name != "root_digest"}
        root_digest = digest_bytes(canonical_json(content))
        data = canonical_json({**content, "root_digest": root_digest})
        if len(data) > MAX_MANIFEST_BYTES:
            raise SourceError(
                f"{len(self.inputs)} input files: the manifest would have {len(data)} bytes, more than the limit of "
                f"{MAX_MANIFEST_BYTES}; combine small files in JSON Lines or archives"
            )
        fields = json.loads(data)
        lists = {name: tuple(fields[name]) for name in ("sources", "inputs", "partitions")}
        return Manifest(**fields | lists | {"shards": tuple(ShardEntry(**shard) for shard in fields["shards"])}), data


_FORM = TypeAdapter(Manifest)


def read_manifest(directory: Path) -> Manifest:
    """Check format, root digest and all values. The shards are not read."""
    path = directory / MANIFEST
    try:
        value = json.loads(read_input(path, MAX_MANIFEST_BYTES, below=directory))
    except (FileNotFoundError, NotADirectoryError):
        again = command_text("prepare", "--output", directory)
        raise PreparedDataError(f"{path}: no such file, so {directory} holds no finished prepared data; run `{again}`") from None
    except UnusableFileError as error:
        raise PreparedDataError(f"{error}; run `prepare` again") from None
    except (ValueError, RecursionError) as error:
        raise PreparedDataError(f"{path}: damaged, not valid JSON ({error}); run `prepare` again") from None
    if not isinstance(value, dict) or value.get("format") not in _FORMATS:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        kind = OtherFormatError if isinstance(found, str) and found.startswith(FAMILY) else PreparedDataError
        raise kind(
            f"{path}: format {_shown(found)}, but this version reads {' and '.join(map(repr, _FORMATS))}; run `prepare` again"
        )
    try:
        return _parse(value, path)
    except (ValueError, RecursionError) as error:
        raise PreparedDataError(f"{path}: not a manifest of format {value['format']}: {error}; run `prepare` again") from None


def distrust(directory: Path) -> None:
    """Delete the note (`published.json`) if possible: a failing device can change content without changing size or time."""
    with suppress(OSError):
        (directory / PUBLISHED).unlink()


def check_digests(directory: Path, digests: Mapping[str, str], sizes: Mapping[str, int] = MappingProxyType({})) -> None:
    for name, digest in digests.items():
        open_listed(directory, name, sizes.get(name), digest).close()


def open_listed(directory: Path, name: str, num_bytes: int | None, digest: str | None) -> BinaryIO:
    """Open a file of a manifest after a check of its size and digest, if they are given.

    A wrong size, or one too large for its kind, is refused before the file is read: a sparse file can have any size.
    """
    path = directory / name
    limits = {"tokenizer": MAX_TOKENIZER_BYTES, REFERENCE: MAX_REFERENCE_BYTES}
    limit = limits.get(name.partition("/")[0], MAX_MANIFEST_BYTES)
    try:
        file = open_input(path, below=directory)
    except UnusableFileError as error:
        raise PreparedDataError(f"{error}; run `prepare` again") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):  # others may be a temporary fault of the device
            raise
        raise PreparedDataError(f"{path}: missing; run `prepare` again") from None
    try:
        size = os.fstat(file.fileno()).st_size
        problem = ""
        if num_bytes is not None and size != num_bytes:
            problem = f"it has {size} bytes, but the manifest says {num_bytes}; the file was changed"
        elif size > limit and not name.endswith(".arrow"):
            problem = f"it has {size} bytes, but at most {limit} can be read"
        elif digest is not None and (found := digest_stream(file)) != digest:
            distrust(directory)
            problem = f"its digest is {found}, but the manifest says {digest}; the file was changed"
        if problem:
            raise PreparedDataError(f"{path}: {problem}: run `prepare` again")
    except BaseException:
        file.close()
        raise
    return file


def _parse(value: Mapping[str, Any], path: Path) -> Manifest:
    content = {name: item for name, item in value.items() if name != "root_digest"}
    data = canonical_json(content)
    root_digest = digest_bytes(data)
    if value.get("root_digest") != root_digest:
        raise PreparedDataError(
            f"{path}: its content has digest {root_digest}, but it says {_shown(value.get('root_digest'))}; "
            "it was changed after it was written: run `prepare` again"
        )
    try:
        manifest = replace(_FORM.validate_json(data, strict=True), root_digest=root_digest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = visible(".".join(map(str, first["loc"])))[:_MAX_PLACE_CHARS]
        found = "" if first["type"] == "missing" else f" = {_shown(first['input'])}"
        raise ValueError(f"{place}{found}: {first['msg']}") from None
    _check_relations(manifest)
    return manifest


def _check_relations(manifest: Manifest) -> None:
    if manifest.vocab_size > 1 << 16 and manifest.token_type == "uint16":
        raise ValueError(f"token_type = 'uint16', but {manifest.vocab_size} ids need uint32")
    for number, shard in enumerate(manifest.shards):
        for name, most in (("tokens", shard.rows * manifest.row_length), ("targets", shard.tokens)):
            if getattr(shard, name) > most:
                raise ValueError(f"shards.{number}.{name} = {getattr(shard, name)}, but at most {most} is expected")
    if (total := sum(shard.rows for shard in manifest.shards)) > _MAX_ROWS:
        raise ValueError(f"the shards have {total} rows, but at most {_MAX_ROWS} are expected")
    if len(manifest.digests) < len(manifest.shards) + len(manifest.files):
        raise ValueError("two of its files have the same path")
    named = {*(shard.source for shard in manifest.shards), *(partition["source"] for partition in manifest.partitions)}
    if unknown := sorted(named - {*manifest.sources}):
        raise ValueError(f"source {_shown(unknown[0])} of a shard or partition is not one of the sources")


def _shown(value: object) -> str:
    return reprlib.repr(value).encode("ascii", "backslashreplace").decode()


def verify(directory: Path) -> Manifest:
    with reading(directory, "verify"):
        manifest = read_manifest(directory)
        check_digests(directory, manifest.digests, manifest.sizes)
    return manifest
