"""Writing files so that a reader finds the old content or the new, never a mixture, and digests that prove which."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

__all__ = [
    "canonical_json",
    "commit_directory",
    "digest_bytes",
    "digest_file",
    "is_unfinished",
    "sealed",
    "sync_directory",
    "sync_file",
    "unfinished_path",
    "unsealed",
    "write_atomic",
]

_READ_BYTES = 1 << 20
_UNFINISHED = re.compile(r"\..+\.\d+\.tmp")


def canonical_json(value: Any) -> bytes:
    """`value` as JSON in its one form: sorted keys, UTF-8, two-space indent, final newline; refuses NaN and infinity.

    Raises:
        ValueError: a number is not finite, so other readers could not parse it.
    """
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=2) + "\n").encode()


def digest_bytes(data: bytes) -> str:
    """`sha256:` and the hexadecimal digest of `data`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def sealed(value: dict[str, Any]) -> bytes:
    """`value` as canonical JSON that carries its own digest, under the key `seal`, over the rest."""
    return canonical_json(value | {"seal": digest_bytes(canonical_json(value))})


def unsealed(data: bytes) -> dict[str, Any]:
    """What `sealed` was given, if not one byte has changed since.

    Raises:
        ValueError: this is not sealed JSON, or it was changed.
    """
    value = json.loads(data)
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it carries no seal")
    content = {key: entry for key, entry in value.items() if key != "seal"}
    if sealed(content) != data:
        raise ValueError("its content does not match its seal")
    return content


def digest_file(path: Path) -> str:
    """`sha256:` and the hexadecimal digest of a file's content, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def sync_file(path: Path) -> None:
    """Forces a file's content to the storage device. A failure is not retried: after one the kernel may have dropped the pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Forces a directory's entries to the storage device, so that a rename in it survives a power failure."""
    sync_file(path)


def unfinished_path(path: Path) -> Path:
    """What `path` is called until this process has finished it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_unfinished(path: Path) -> bool:
    """Whether this is the name of something that a process still writes, or wrote when it was killed."""
    return _UNFINISHED.fullmatch(path.name) is not None


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` by `data`, durably: temporary file, fsync, rename, fsync of the directory."""
    temporary = unfinished_path(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def commit_directory(temporary: Path, final: Path) -> None:
    """Gives a finished directory its final name, durably: fsync of every file and directory in it, rename, fsync of the parent.

    Raises:
        OSError: `final` exists and is not empty, or a file could not be forced to the device.
    """
    for folder, _, names in os.walk(temporary):
        for name in names:
            sync_file(Path(folder, name))
        sync_directory(Path(folder))
    temporary.rename(final)
    sync_directory(final.parent)
