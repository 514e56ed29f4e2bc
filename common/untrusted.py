"""Reading the files of a run folder, which may come from a stranger: regular files below it, of a size that fits their kind.

No number in them is believed before it was checked: `check_form` compares what a file holds with the types and ranges that this
program writes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.errors import CheckpointError
from common.files import UnusableFileError, open_input, read_input
from common.settings.load import MAX_SETTINGS_BYTES

__all__ = [
    "MAX_COUNT",
    "MAX_EXTENSION_BYTES",
    "MAX_LINES_BYTES",
    "MAX_LINE_BYTES",
    "MAX_NOTE_BYTES",
    "MAX_PROMPTS_BYTES",
    "MAX_RECORD_BYTES",
    "Count",
    "Finite",
    "Form",
    "InnerName",
    "Plain",
    "check_form",
    "copy_run_file",
    "digest_run_file",
    "number",
    "read_lines",
    "read_run_file",
]

MAX_RECORD_BYTES = 16 << 20
MAX_NOTE_BYTES = 1 << 20
"""Of a change that one rank has noted."""
MAX_PROMPTS_BYTES = 64 << 20
MAX_EXTENSION_BYTES = 16 << 20
MAX_LINE_BYTES = 16 << 20
"""Of one event in the metrics or the ledger."""
MAX_LINES_BYTES = 16 << 30
"""Of the metrics or the ledger as a whole: the events of forty million steps."""
_MAX_OTHER_BYTES = 256 << 20
_READ_BYTES = 1 << 20
_MAX_SHOWN_CHARS = 80
_RESTORE = "restore it from a copy, or use another run"

MAX_COUNT = 1 << 53
"""No counter of a run reaches it; sums of two still fit 64 bits."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A whole number that counts something."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


def _inner(name: object) -> object:
    """`name`, if it is a relative path that stays inside; no path can be made of any other."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ValueError("is no path")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError("leads out of the folder")
    return name


InnerName = Annotated[str, BeforeValidator(_inner)]
"""The path of a file inside the folder that names it."""
_Scalar = str | int | float | bool | None
Plain = _Scalar | list[_Scalar] | dict[str, _Scalar | list[_Scalar]]
"""What a fact of a record is made of."""


class Form(BaseModel):
    """What a table in a file of a run has to hold; other names in it are not looked at."""

    model_config = ConfigDict(strict=True, extra="allow")


def check_form(form: type[Form], value: object) -> None:
    """Compares a value out of JSON with what it has to be.

    Raises:
        ValueError: it is something else; the message names the first field that is wrong.
    """
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))[:_MAX_SHOWN_CHARS]
        reason = first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] == "missing" else f" = {_short(first['input'])}"
        raise ValueError(f"{place}{shown}: {reason[:1].lower()}{reason[1:]}" if place else f"{_short(value)}: {reason}") from None
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def number(value: object) -> float | None:
    """Return a number out of JSON as a float, and None for any other value. The texts "nan" and "inf" are numbers too."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_run_file(path: Path, max_bytes: int, below: Path) -> bytes:
    """The content of a file of a run; links are not followed from the folder `below` on.

    Raises:
        CheckpointError: it is no regular file, larger than its kind may be, or outside the folder.
        FileNotFoundError: it is missing.
        OSError: it cannot be read.
    """
    with _as_checkpoint_error(path):
        return read_input(path, max_bytes, below=below)


def read_lines(path: Path, below: Path) -> Iterator[bytes]:
    """The lines of a large file of a run with their ends, one in memory at a time.

    Raises:
        CheckpointError: as `read_run_file`, or a line is too long.
        OSError: as `read_run_file`.
    """
    with _as_checkpoint_error(path):
        file = open_input(path, below=below)
    with file:
        _check_size(path, os.fstat(file.fileno()).st_size, MAX_LINES_BYTES)
        number = total = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number, total = number + 1, total + len(line)
            if len(line) > MAX_LINE_BYTES:
                raise CheckpointError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes, as no event is; {_RESTORE}")
            _check_size(path, total, MAX_LINES_BYTES)
            yield line


def digest_run_file(run: Path, name: str) -> str:
    """`sha256:` and the hexadecimal digest of a file of a run, by its path inside the run.

    Raises:
        CheckpointError, OSError: as `read_run_file`.
    """
    path, digest = run / name, hashlib.sha256()
    for chunk in _chunks(path, run):
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def copy_run_file(run: Path, name: str, target: Path) -> None:
    """Writes a copy of a file of a run to `target`.

    Raises:
        CheckpointError, OSError: as `read_run_file`.
    """
    with target.open("xb") as file:
        for chunk in _chunks(run / name, run):
            file.write(chunk)


def _chunks(path: Path, below: Path) -> Iterator[bytes]:
    max_bytes = MAX_LINES_BYTES if path.suffix == ".jsonl" else MAX_SETTINGS_BYTES if path.suffix == ".toml" else _MAX_OTHER_BYTES
    with _as_checkpoint_error(path):
        file = open_input(path, below=below)
    with file:
        _check_size(path, os.fstat(file.fileno()).st_size, max_bytes)
        total = 0
        while chunk := file.read(_READ_BYTES):
            total += len(chunk)
            _check_size(path, total, max_bytes)  # it may grow while it is read
            yield chunk


def _check_size(path: Path, num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most that a file of its kind may have; {_RESTORE}")


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; {_RESTORE}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path}: a file stands where a folder of its path is expected; {_RESTORE}") from None


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else f"a {'table' if isinstance(value, dict) else 'list'}"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
