"""The texts of this program's own source code, in place of any text that a user, a library or a machine wrote.

A secret cannot be among them, whatever its form: all of them are published with the source.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

import common.errors

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("common", "data_pipeline", "trainer")
_FEWEST_CHARS = 12  # shorter parts say too little about the message that they come from
_FRAME = re.compile(r"((?:common|data_pipeline|trainer)(?:/\w{1,60}){1,6}\.py)\", line ([0-9]{1,6})(?![0-9])", re.ASCII)
_ERROR = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){0,6}([A-Za-z_]\w{0,60})(?=:|$)", re.ASCII)


@cache
def _own_texts() -> frozenset[str]:
    return frozenset(text for package in _PACKAGES for path in (_ROOT / package).rglob("*.py") for text in _constants(path))


def _constants(path: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id  # a field of a class is a name in the file that the class describes


@cache
def _parts() -> tuple[str, ...]:
    parts = {part for text in _own_texts() for part in re.split(r"%(?:\.\d)?[sdgf]|\n", text)}
    return tuple(sorted((part for part in parts if " " in part.strip() and len(part) >= _FEWEST_CHARS), key=len, reverse=True))


def is_own_word(value: object) -> bool:
    return isinstance(value, str) and value in _own_texts()


def own_parts(text: str) -> str:
    """Return the parts of a message that the source code holds, with `…` between them; empty if there are none."""
    found = []
    for part in _parts():
        if (place := text.find(part)) >= 0:
            found.append((place, part.strip()))
            text = text.replace(part, "\0" * len(part))
    return " … ".join(part for _, part in sorted(found))


def own_place(line: str) -> str:
    """Return FILE:LINE for a line of a traceback about a file of this program, or the class of a known error that begins a line."""
    if (frame := _FRAME.search(line)) and (_ROOT / frame[1]).is_file():
        return f"{frame[1]}:{frame[2]}"
    error = _ERROR.match(line)
    known = error and next((found for home in (builtins, common.errors, torch) if (found := getattr(home, error[1], None))), None)
    return known.__name__ if isinstance(known, type) and issubclass(known, BaseException) else ""
