"""The built-in corpus from the standard library: its source files, and the language reference of `help()`."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from common.files import UnusableFileError, read_input

# Tests and bundled programs are repetitive; site-packages is not the standard library and differs between machines.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def code_files(library: Path) -> list[Path]:
    return [
        path
        for path in library.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts) and not path.name.startswith("_sysconfigdata")
    ]


def parse_topics(code: str) -> list[tuple[int, str]]:
    """Return line number and text of every topic in the code of `topics.py`, which is parsed and never run."""
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            texts = [ast.literal_eval(value) for value in statement.value.values]
            return [(value.lineno, text) for value, text in zip(statement.value.values, texts, strict=True)]
    raise ValueError("it assigns no dict literal")


_PLACEHOLDERS = {"README.md", ".gitignore"}  # files in the folder `text` of a fresh checkout
_FIRST_LINE = b"# Put your text here\n"
_MAX_README_BYTES = 1 << 20


def is_placeholder(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names <= _PLACEHOLDERS:
        return False
    try:
        return "README.md" not in names or read_input(folder / "README.md", _MAX_README_BYTES).startswith(_FIRST_LINE)
    except UnusableFileError:
        return False
