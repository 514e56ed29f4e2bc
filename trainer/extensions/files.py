"""The files of an extension: one Python file, or a folder with `__init__.py`.

Everywhere in this package they are contents by name: the path below the folder, or "" for the one file.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from pathlib import Path

from common.errors import ConfigError
from common.files import UnusableFileError, canonical_json, digest_bytes, own_folder, read_input, write_atomic
from common.untrusted import MAX_EXTENSION_BYTES
from trainer.runs.layout import EXTENSION, EXTENSION_FOLDER, is_extension

Digests = str | dict[str, str]  # of one file, or of the files of a folder: `extension` of a run's identity

PACKAGE = "__init__.py"
_MAX_FILES = 256
_LEFT_OUT = re.compile(r"(.*/)?(\.|__pycache__/).*")


def read_extension(path: Path) -> dict[str, bytes]:
    try:
        return _read_folder(path) if path.is_dir() else {"": read_input(path, MAX_EXTENSION_BYTES)}
    except (OSError, UnusableFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"extension = {path}: cannot be read ({reason}); name a Python file or a folder of them") from None


def _read_folder(path: Path) -> dict[str, bytes]:
    found = {place.relative_to(path).as_posix(): place for place in sorted(path.rglob("*")) if not place.is_dir()}
    found = {name: place for name, place in found.items() if not _LEFT_OUT.fullmatch(name)}
    if PACKAGE not in found:
        raise ConfigError(f"extension = {path}: the folder has no {PACKAGE}; add one that defines or imports the functions")
    if strange := [name for name in found if not is_extension(copy_name(name))]:
        raise ConfigError(
            f"extension = {path}: {strange[0]!r} cannot be the name of a file of an extension; use letters, digits, _ and -, a dot "
            "in the names of files and none in those of folders"
        )
    if len(found) > _MAX_FILES:
        raise ConfigError(f"extension = {path}: {len(found)} files, and the limit is {_MAX_FILES}; name a folder of code alone")
    files, left = {}, MAX_EXTENSION_BYTES
    for name, place in found.items():
        files[name] = read_input(place, left)
        left -= len(files[name])
    return files


def digests_of(files: Mapping[str, bytes]) -> Digests:
    digests = {name: digest_bytes(content) for name, content in files.items()}
    return digests.get("", digests)


def digest_of(digests: Digests) -> str:
    """Return one digest for all files."""
    return digests if isinstance(digests, str) else digest_bytes(canonical_json(digests))


def copy_name(name: str) -> str:
    """Return the place of a file's copy in a run folder."""
    return f"{EXTENSION_FOLDER}/{name}" if name else EXTENSION


def copy_of(folder: Path, files: Container[str]) -> Path:
    """Return the path of the whole copy in a run folder."""
    return folder / (EXTENSION if "" in files else EXTENSION_FOLDER)


def write_copies(folder: Path, files: Mapping[str, bytes]) -> list[str]:
    """Write the files below a run folder, delete other copies, and return their names."""
    copies = {copy_name(name): content for name, content in files.items()}
    for name, content in copies.items():
        for parent in reversed(Path(name).parents[:-1]):
            own_folder(folder / parent)
        write_atomic(folder / name, content)
    for path in (folder / EXTENSION, *(folder / EXTENSION_FOLDER).rglob("*.*")):
        if path.relative_to(folder).as_posix() not in copies and not path.is_dir():
            path.unlink(missing_ok=True)
    return list(copies)
