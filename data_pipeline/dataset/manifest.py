"""The manifest of prepared data: a list of all files with a digest of each, and one root digest over the whole list.

It contains no time, machine or absolute path, so the same input gives the same bytes on every machine.
"""

from __future__ import annotations

import errno
import json
import os
import re
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from dataclasses import fields as dataclass_fields
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from common.command_line import command_text
from common.errors import PreparedDataError, SourceError
from common.files import UnusableFileError, canonical_json, digest_bytes, digest_stream, open_input, read_input
from data_pipeline.config import named_files, shaping_settings
from data_pipeline.dataset.layout import MANIFEST, PUBLISHED, REFERENCE
from data_pipeline.dataset.locks import reading
from data_pipeline.tokenizer.base import MAX_TOKENIZER_BYTES, MAX_VOCAB_SIZE

__all__ = [
    "FORMAT",
    "MASKED_FORMAT",
    "MAX_MANIFEST_BYTES",
    "MAX_REFERENCE_BYTES",
    "MAX_ROW_LENGTH",
    "Manifest",
    "OtherFormatError",
    "ShardEntry",
    "check_digests",
    "distrust",
    "files_in_manifest",
    "is_missing",
    "read_manifest",
    "verify",
]

_FAMILY = "packed-rows/"
FORMAT = f"{_FAMILY}2"
MASKED_FORMAT = f"{_FAMILY}3"
"""The format of data with a loss mask: shards and tables may have a column `loss_runs` (see `loss_mask`)."""
_FORMATS = (FORMAT, MASKED_FORMAT)
MAX_MANIFEST_BYTES = 512 << 20
"""Enough for about a million input files."""
MAX_REFERENCE_BYTES = 4 << 30
"""More than a reference model has with the highest `quality.reference_bits`."""
MAX_ROW_LENGTH = 1 << 20
_MAX_SHARD_ROWS = (1 << 31) - 1  # the offsets of the lists in a shard are int32
_MAX_ROWS = 1 << 40  # the order of training rows is defined up to this number
_MAX_FILE_BYTES = 1 << 62
_MAX_NAME = 1024
_SOURCE = re.compile("[a-z0-9_-]{1,64}")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


class OtherFormatError(PreparedDataError):
    """Another version of this program has written the manifest."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard: rows of one split, all from one source."""

    path: str
    """Path relative to the folder of the manifest, such as `train/stdlib-code-00000.arrow`."""
    split: str
    source: str
    rows: int
    tokens: int
    """Number of tokens without padding."""
    targets: int
    """Number of tokens that the model predicts: those with a loss, except the first token of each document in a row."""
    bytes: int
    """Size of the file in bytes."""
    sha256: str
    """`sha256:…` of the file."""


@dataclass(frozen=True)
class Manifest:
    """The checked content of `manifest.json`."""

    fingerprint: str
    """Digest of the settings and the input. Equal fingerprints mean equal prepared data."""
    row_length: int
    vocab_size: int
    token_type: str
    """`uint16` or `uint32`."""
    tokenizer_kind: str
    tokenizer_digest: str
    sources: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    files: dict[str, str]
    """Digest of every other file by name: tokenizer, report and tables."""
    inputs: tuple[dict[str, Any], ...]
    """Source, path, size and digest of every input file."""
    partitions: tuple[dict[str, Any], ...]
    """Source, files and byte ranges of every partition. The id of a document contains an index into this list (see `documents`)."""
    config: dict[str, Any]
    """The settings that determine the result."""
    totals: dict[str, Any]
    """The counts of the report."""
    root_digest: str = field(default="")
    format: str = FORMAT

    @property
    def digests(self) -> dict[str, str]:
        return {shard.path: shard.sha256 for shard in self.shards} | self.files

    @property
    def shaping(self) -> dict[str, Any]:
        """The settings that determine the prepared bytes. Only these may be used to prepare the data again."""
        return shaping_settings(self.config)

    @property
    def named_files(self) -> list[str]:
        """Names of the settings that refer to files. The manifest has only the digests of these files."""
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
        """Return this manifest with its root digest, as a reader would parse it, and the bytes of its file.

        The file sorts all keys. The returned manifest is parsed from these bytes, so it does not depend on the order of insertion.
        """
        content = {name: value for name, value in asdict(self).items() if name != "root_digest"}
        sealed = {**content, "root_digest": digest_bytes(canonical_json(content))}
        data = canonical_json(sealed)
        if len(data) > MAX_MANIFEST_BYTES:
            raise SourceError(
                f"{len(self.inputs)} input files: the manifest would have {len(data)} bytes, more than the limit of "
                f"{MAX_MANIFEST_BYTES}; combine small files in JSON Lines or archives"
            )
        return _manifest({name: item for name, item in json.loads(data).items() if name in content}, sealed["root_digest"]), data


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of prepared data, and check its format, its root digest and all its values. The shards are not read."""
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
        kind = OtherFormatError if isinstance(found, str) and found.startswith(_FAMILY) else PreparedDataError
        raise kind(
            f"{path}: format {_shown(found)}, but this version reads {' and '.join(map(repr, _FORMATS))}; run `prepare` again"
        )
    try:
        return _parse(value, path)
    except (ValueError, RecursionError) as error:
        raise PreparedDataError(f"{path}: not a manifest of format {value['format']}: {error}; run `prepare` again") from None


def distrust(directory: Path) -> None:
    """Delete the note (`published.json`) of damaged data, so that the next `prepare` reads every file and trusts no size or time.

    A failing device can change content without changing size or time. If the folder is read-only, the note stays.
    """
    with suppress(OSError):
        (directory / PUBLISHED).unlink()


def files_in_manifest(directory: Path) -> set[str]:
    """Return the files that a manifest lists. It may have an older format or be damaged; if it is not readable, there are none."""
    try:
        value = json.loads(read_input(directory / MANIFEST, MAX_MANIFEST_BYTES, below=directory))
        if not value["format"].startswith(_FAMILY):
            return set()
        return {*value["files"], *(shard["path"] for shard in value["shards"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def check_digests(directory: Path, digests: Mapping[str, str], sizes: Mapping[str, int] = MappingProxyType({})) -> None:
    """Read files of prepared data, by name, and compare each with its digest in the manifest.

    A file with a wrong size, or one too large for its kind, is refused before it is read: a sparse file can have any size.
    """
    for name, expected in digests.items():
        path = directory / name
        try:
            with open_input(path, below=directory) as file:
                _check_size(path, os.fstat(file.fileno()).st_size, sizes.get(name), _limit_of(name))
                found = digest_stream(file)
        except OSError as error:
            if not is_missing(error):
                raise
            raise PreparedDataError(f"{path}: missing; run `prepare` again") from None
        except UnusableFileError as error:
            raise PreparedDataError(f"{error}; run `prepare` again") from None
        if found != expected:
            distrust(directory)
            raise PreparedDataError(
                f"{path}: its digest is {found}, but the manifest says {expected}; the file was changed: run `prepare` again"
            )


def _check_size(path: Path, found: int, expected: int | None, limit: int | None) -> None:
    if expected is not None and found != expected:
        raise PreparedDataError(
            f"{path}: it has {found} bytes, but the manifest says {expected}; the file was changed: run `prepare` again"
        )
    if limit is not None and found > limit:
        raise PreparedDataError(f"{path}: it has {found} bytes, but at most {limit} can be read; run `prepare` again")


def _limit_of(name: str) -> int | None:
    if name.startswith("tokenizer/"):
        return MAX_TOKENIZER_BYTES
    if name == REFERENCE:
        return MAX_REFERENCE_BYTES
    return None if name.endswith(".arrow") else MAX_MANIFEST_BYTES


def is_missing(error: OSError) -> bool:
    """Whether an error means that a file does not exist. Any other error may be a temporary fault of the device."""
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def _parse(value: Mapping[str, Any], path: Path) -> Manifest:
    content = {name: item for name, item in value.items() if name != "root_digest"}
    root_digest = digest_bytes(canonical_json(content))
    if value.get("root_digest") != root_digest:
        raise PreparedDataError(
            f"{path}: its content has digest {root_digest}, but it says {_shown(value.get('root_digest'))}; "
            "it was changed after it was written: run `prepare` again"
        )
    _check_fields(content)
    return _manifest(content, root_digest)


def _manifest(fields: Mapping[str, Any], root_digest: str) -> Manifest:
    lists = {name: tuple(fields[name]) for name in ("sources", "inputs", "partitions")}
    shards = tuple(ShardEntry(**shard) for shard in fields["shards"])
    return Manifest(**{**fields, **lists, "shards": shards}, root_digest=root_digest)


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a value that `prepare` does not write, because a stranger may have written the file."""
    _check_names("the manifest", fields, [field.name for field in dataclass_fields(Manifest) if field.name != "root_digest"])
    for name in ("fingerprint", "tokenizer_kind", "tokenizer_digest"):
        _check_text(name, fields[name])
    _check_whole("row_length", fields["row_length"], 1, MAX_ROW_LENGTH)
    _check_whole("vocab_size", fields["vocab_size"], 1, MAX_VOCAB_SIZE)
    if fields["token_type"] not in (("uint16", "uint32") if fields["vocab_size"] <= 1 << 16 else ("uint32",)):
        raise _unexpected("token_type", fields["token_type"], f"a type for {fields['vocab_size']} ids, uint16 or uint32")
    for number, source in enumerate(_list("sources", fields["sources"])):
        if not (isinstance(source, str) and _SOURCE.fullmatch(source)):
            raise _unexpected(f"sources[{number}]", source, "a name of lower-case letters, digits, _ and -, at most 64")
    _check_shards(fields)
    for name, digest in _table("files", fields["files"]).items():
        _check_path("files", name)
        _check_digest(f"files.{name}", digest)
    paths = [shard["path"] for shard in fields["shards"]] + list(fields["files"])
    if len(set(paths)) < len(paths):
        raise ValueError("two of its files have the same path")
    _check_inputs(fields)
    _table("config", fields["config"])
    for name, report in _table("totals.sources", _table("totals", fields["totals"]).get("sources", {})).items():
        _table(f"totals.sources.{name}", report)
        if not isinstance(report.get("kind"), str | None):
            raise _unexpected(f"totals.sources.{name}.kind", report["kind"], "a text")


def _check_shards(fields: Mapping[str, Any]) -> None:
    names, sources, total = [field.name for field in dataclass_fields(ShardEntry)], set(fields["sources"]), 0
    for number, shard in enumerate(_list("shards", fields["shards"])):
        place = f"shards[{number}]"
        _check_names(place, _table(place, shard), names)
        _check_path(f"{place}.path", shard["path"])
        if shard["split"] not in ("train", "val"):
            raise _unexpected(f"{place}.split", shard["split"], "train or val")
        if not (isinstance(shard["source"], str) and shard["source"] in sources):
            raise _unexpected(f"{place}.source", shard["source"], "one of the sources of the manifest")
        _check_whole(f"{place}.rows", shard["rows"], 0, _MAX_SHARD_ROWS)
        _check_whole(f"{place}.tokens", shard["tokens"], 0, shard["rows"] * fields["row_length"])
        _check_whole(f"{place}.targets", shard["targets"], 0, shard["tokens"])
        _check_whole(f"{place}.bytes", shard["bytes"], 0, _MAX_FILE_BYTES)
        _check_digest(f"{place}.sha256", shard["sha256"])
        total += shard["rows"]
    if total > _MAX_ROWS:
        raise _unexpected("the number of rows of all shards", total, f"at most {_MAX_ROWS}")


def _check_inputs(fields: Mapping[str, Any]) -> None:
    for number, file in enumerate(_list("inputs", fields["inputs"])):
        place = f"inputs[{number}]"
        for name in ("source", "path"):
            if not isinstance(_table(place, file).get(name), str):
                raise _unexpected(f"{place}.{name}", file.get(name), "a text")
        _check_whole(f"{place}.bytes", file.get("bytes"), 0, _MAX_FILE_BYTES)
    sources = set(fields["sources"])
    for number, partition in enumerate(_list("partitions", fields["partitions"])):
        place = f"partitions[{number}]"
        source = _table(place, partition).get("source")
        if not (isinstance(source, str) and source in sources):
            raise _unexpected(f"{place}.source", source, "one of the sources of the manifest")
        _list(f"{place}.parts", partition.get("parts"))


def _check_names(place: str, found: Mapping[str, Any], expected: Sequence[str]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise ValueError(f"{place} has no {missing[0]}")
    if unknown := sorted(found.keys() - set(expected)):
        raise ValueError(f"{place} has {_shown(unknown[0])}, which is unknown")


def _check_whole(place: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _unexpected(place, value, f"a whole number from {low} to {high}")


def _check_text(place: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value.isprintable():
        raise _unexpected(place, value, "a text in one line")


def _check_digest(place: str, value: object) -> None:
    if not (isinstance(value, str) and _DIGEST.fullmatch(value)):
        raise _unexpected(place, value, "sha256: and 64 hexadecimal digits")


def _check_path(place: str, value: object) -> None:
    _check_text(place, value)
    path = PurePosixPath(str(value))
    if path.is_absolute() or str(path) != value or not path.name or {".", ".."} & {*path.parts}:
        raise _unexpected(place, value, "the path of a file inside the folder of the manifest")


def _list(place: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _unexpected(place, value, "a list")
    return value


def _table(place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _unexpected(place, value, "an object")
    return value


def _unexpected(place: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{place} = {_shown(value)}, but {expected} is expected")


def _shown(value: object) -> str:
    return reprlib.repr(value).encode("ascii", "backslashreplace").decode()


def verify(directory: Path) -> Manifest:
    with reading(directory, "verify"):
        manifest = read_manifest(directory)
        check_digests(directory, manifest.digests, manifest.sizes)
    return manifest
