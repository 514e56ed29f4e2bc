"""Reads the files of a run folder, which may come from a stranger: only regular files below it, of limited size."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from common.errors import CheckpointError
from common.files import UnusableFileError, open_input, read_input
from common.settings.load import MAX_SETTINGS_BYTES

MAX_RECORD_BYTES = 16 << 20
MAX_NOTE_BYTES = 1 << 20  # for the file in which one rank has noted an adjustment
MAX_PROMPTS_BYTES = 64 << 20
MAX_EXTENSION_BYTES = 16 << 20
MAX_LINE_BYTES = 16 << 20  # for one event in the metrics or the ledger
MAX_LINES_BYTES = 16 << 30  # for the metrics or the ledger as a whole: the events of forty million steps
_MAX_OTHER_BYTES = 256 << 20
_MAX_WEIGHTS_BYTES = 1 << 44
_READ_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 80
_RESTORE = "restore it from a copy, or use another run"

MAX_COUNT = 1 << 53  # the highest value of a counter. No run reaches it, and the sum of two counters fits into 64 bits.
Count = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]


def _inner(name: object) -> object:
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError("is not a path")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("leads out of the folder")
    return name


InnerName = Annotated[str, BeforeValidator(_inner)]  # the path of a file inside the folder that names it
_Scalar = str | int | float | bool | None
Plain = _Scalar | list[_Scalar] | dict[str, _Scalar | list[_Scalar]]  # the type of a fact in a record


class Schema(BaseModel):
    """A table in a file of a run. Fields that this version does not know are kept, and written again."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def to_json(self) -> dict[str, Any]:
        """A field that was neither read nor set is absent."""
        return self.model_dump(exclude_unset=True)


T = TypeVar("T")


def parsed(kind: type[T], value: object) -> T:
    """ValueError names the first field that does not fit."""
    try:
        return cast(T, _adapter(cast(Any, kind)).validate_python(value))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:_MAX_SHOWN_CHARS]
        reason = first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] == "missing" else f" = {_short(first['input'])}"
        raise ValueError(f"{place}{shown}: {reason[:1].lower()}{reason[1:]}" if place else f"{_short(value)}: {reason}") from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)  # the texts "nan" and "inf" are numbers too
    except (ValueError, OverflowError):
        return None


def read_run_file(path: Path, max_bytes: int, below: Path) -> bytes:
    """CheckpointError if it is no regular file, too large, or outside of `below`."""
    with _as_checkpoint_error(path):
        return read_input(path, max_bytes, below=below)


def read_lines(path: Path, below: Path) -> Iterator[bytes]:
    """With their line ends. One line is in memory at a time."""
    lines = _pieces(path, below, MAX_LINES_BYTES, lambda file: file.readline(MAX_LINE_BYTES + 1))
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_LINE_BYTES:
            raise CheckpointError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes, the limit; {_RESTORE}")
        yield line


def digest_run_file(run: Path, name: str) -> str:
    path, digest = run / name, hashlib.sha256()
    for chunk in _chunks(path, run):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def copy_run_file(run: Path, name: str, target: Path) -> None:
    with target.open("xb") as file:
        for chunk in _chunks(run / name, run):
            file.write(chunk)


def _chunks(path: Path, below: Path) -> Iterator[bytes]:
    limits = {".jsonl": MAX_LINES_BYTES, ".toml": MAX_SETTINGS_BYTES, ".safetensors": _MAX_WEIGHTS_BYTES}
    return _pieces(path, below, limits.get(path.suffix, _MAX_OTHER_BYTES), lambda file: file.read(_READ_BYTES))


def _pieces(path: Path, below: Path, max_bytes: int, read: Callable[[BinaryIO], bytes]) -> Iterator[bytes]:
    with _as_checkpoint_error(path):
        file = open_input(path, below=below)
    with file:
        found, total = os.fstat(file.fileno()).st_size, 0
        while found <= max_bytes and (piece := read(file)):
            total += len(piece)
            if (found := max(found, total)) <= max_bytes:  # the file may grow while it is read
                yield piece
    if found > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the limit for a file of this kind; {_RESTORE}")


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; {_RESTORE}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path}: a part of this path is a file, and a folder is expected there; {_RESTORE}") from None


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {'table' if isinstance(value, dict) else 'list'}"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
