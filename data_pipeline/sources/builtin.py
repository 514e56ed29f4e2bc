"""The built-in corpus: the text of the interpreter's own standard library. Real code and prose, with no download.

`stdlib-code` is its source files, `stdlib-manual` the topics of the language reference that `help()` prints.
"""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from common.files import UnusableFileError, read_input

__all__ = ["code_files", "is_placeholder", "manual_file", "parse_topics", "standard_library"]

# Tests and bundled programs are repetitive; site-packages is not the standard library and differs between machines.
_LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}


def standard_library() -> Path:
    """The folder of the interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def code_files(library: Path) -> list[Path]:
    """Its source files, without tests, bundled programs, installed packages, and files generated for one machine."""
    return [
        path
        for path in library.rglob("*.py")
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts) and not path.name.startswith("_sysconfigdata")
    ]


def manual_file(library: Path) -> Path:
    """The file that holds the topics of the language reference."""
    return library / "pydoc_data" / "topics.py"


def parse_topics(code: str) -> list[tuple[int, str]]:
    """Line number and text of every topic in `topics.py`, whose dict literal is parsed and never run.

    Raises:
        ValueError: the file has another shape than every Python release so far.
    """
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            texts = [ast.literal_eval(value) for value in statement.value.values]
            return [(value.lineno, text) for value, text in zip(statement.value.values, texts, strict=True)]
    raise ValueError("no dict literal is assigned in it")


_PLACEHOLDERS = {"README.md", ".gitignore"}
"""What the folder `text` of a fresh checkout holds."""
_FIRST_LINE = b"# Put your text here\n"
_MAX_README_BYTES = 1 << 20


def is_placeholder(folder: Path) -> bool:
    """Whether a folder is empty, or holds nothing but the files that say "put your text here"."""
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if not names <= _PLACEHOLDERS:
        return False
    try:
        return "README.md" not in names or read_input(folder / "README.md", _MAX_README_BYTES).startswith(_FIRST_LINE)
    except UnusableFileError:
        return False
