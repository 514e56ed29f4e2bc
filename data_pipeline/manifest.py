"""The manifest: what prepared data consists of, with a digest of every file and one root digest over all of it.

It names no time, no machine and no absolute path: the same input gives the same bytes of it anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import PreparedDataError
from data_pipeline.files import canonical_json, digest_bytes, digest_file

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PUBLISHED",
    "Manifest",
    "ShardEntry",
    "check_digests",
    "distrust",
    "files_in_manifest",
    "read_manifest",
]

FORMAT = "packed-rows/2"
MANIFEST = "manifest.json"
PUBLISHED = "published.json"
"""The note beside the manifest: what preparations have put there, with sizes and times."""


@dataclass(frozen=True)
class ShardEntry:
    """One shard: rows of one split, all from one source."""

    path: str
    """Relative to the folder of the manifest, such as `train/stdlib-code-00000.arrow`."""
    split: str
    source: str
    rows: int
    tokens: int
    """Tokens that are no padding."""
    targets: int
    """Tokens that are predicted: all but the first of each document in a row."""
    bytes: int
    """Size of the file."""
    sha256: str
    """`sha256:…` of the file."""


@dataclass(frozen=True)
class Manifest:
    """What `manifest.json` says, checked."""

    fingerprint: str
    """Digest of the settings and the input: equal fingerprints mean equal prepared data."""
    row_length: int
    vocab_size: int
    token_type: str
    """`uint16` or `uint32`."""
    tokenizer_kind: str
    tokenizer_digest: str
    sources: tuple[str, ...]
    shards: tuple[ShardEntry, ...]
    files: dict[str, str]
    """Digest of every other file: the tokenizer and the report."""
    inputs: tuple[dict[str, Any], ...]
    """Source, path, size and digest of every input file."""
    partitions: tuple[dict[str, Any], ...]
    """Source, files and byte ranges of every partition; a document's id leads here (see `documents`)."""
    config: dict[str, Any]
    """The settings that decide the result."""
    totals: dict[str, Any]
    """The report's counts."""
    root_digest: str = field(default="")

    @property
    def digests(self) -> dict[str, str]:
        """The digest of every file that it answers for."""
        return {shard.path: shard.sha256 for shard in self.shards} | self.files

    def sealed(self) -> tuple[Manifest, bytes]:
        """This manifest with its root digest, as it is read back, and the bytes of its file.

        So what is made of it does not depend on the order in which its parts came to be, which the file does not keep.
        """
        content = self._content()
        sealed = {**content, "root_digest": digest_bytes(canonical_json(content))}
        data = canonical_json(sealed)
        return _parse(json.loads(data), Path(MANIFEST)), data

    def _content(self) -> dict[str, Any]:
        content = {name: value for name, value in asdict(self).items() if name != "root_digest"}
        return {**content, "format": FORMAT}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of prepared data, after a check of its format and root digest; the shards themselves are not read.

    Raises:
        PreparedDataError: there is none, it is of another format, or it was changed after it was written.
    """
    path = directory / MANIFEST
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise PreparedDataError(
            f"{path}: no such file, so {directory} holds no finished prepared data; "
            f"run `python -m data_pipeline prepare --output {directory}`"
        ) from None
    except ValueError as error:
        raise PreparedDataError(f"{path}: damaged, not valid JSON ({error}); run `prepare` again") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise PreparedDataError(f"{path}: format {found!r}, but this version reads {FORMAT!r}; run `prepare` again")
    return _parse(value, path)


def distrust(directory: Path) -> None:
    """Takes away the note of prepared data that was found damaged, so that the next `prepare` reads every file before it trusts it.

    A device can change what it holds without any new size or time. Where the folder cannot be written to, the note stays.
    """
    with suppress(OSError):
        (directory / PUBLISHED).unlink()


def files_in_manifest(directory: Path) -> set[str]:
    """The files that a manifest names, also one of an older format or with damage that leaves it legible; else none."""
    try:
        value = json.loads((directory / MANIFEST).read_bytes())
        if not value["format"].startswith(FORMAT.partition("/")[0] + "/"):
            return set()
        return {*value["files"], *(shard["path"] for shard in value["shards"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def check_digests(directory: Path, digests: Mapping[str, str]) -> None:
    """Reads files of prepared data, by name, and compares each with the digest that the manifest has of it.

    Raises:
        PreparedDataError: a file is missing or changed; the message names the first one.
    """
    for name, expected in digests.items():
        path = directory / name
        if not path.is_file():
            raise PreparedDataError(f"{path}: missing; run `prepare` again")
        if (found := digest_file(path)) != expected:
            distrust(directory)
            raise PreparedDataError(f"{path}: {found}, but the manifest says {expected}; the file was changed: run `prepare` again")


def _parse(value: Mapping[str, Any], path: Path) -> Manifest:
    content = {name: item for name, item in value.items() if name != "root_digest"}
    root_digest = digest_bytes(canonical_json(content))
    if value.get("root_digest") != root_digest:
        raise PreparedDataError(
            f"{path}: its content has digest {root_digest}, but it says {value.get('root_digest')}; "
            "it was changed after it was written: run `prepare` again"
        )
    fields = {name: item for name, item in content.items() if name != "format"}
    try:
        for name in ("sources", "inputs", "partitions"):
            fields[name] = tuple(fields[name])
        fields["shards"] = tuple(ShardEntry(**shard) for shard in fields["shards"])
        return Manifest(**fields, root_digest=root_digest)
    except (KeyError, TypeError) as error:
        raise PreparedDataError(f"{path}: not a manifest of format {FORMAT} ({error}); run `prepare` again") from None
