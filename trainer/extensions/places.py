"""The place in an extension that caused an error, as text for messages."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import cast

from torch import Tensor


def place_of(path: Path | None, line: int | None) -> str:
    return f"{path}" if line is None else f"{path}, line {line}"


def line_in(path: Path | None, error: BaseException) -> int | None:
    """Return the last line of the file in the traceback of an error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def line_of(function: object) -> int | None:
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return None if code is None else cast(int, code.co_firstlineno)


def described(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
