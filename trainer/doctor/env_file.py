"""Reads files of variables as Compose does. Standard library alone."""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)[ \t]*[=:](?P<value>.*)", re.DOTALL)


def read_variables(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        return parse_variables(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, [] if isinstance(error, FileNotFoundError) else [f"it cannot be read: {error.strerror}"]


def parse_variables(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables in NAME=VALUE lines, and a text for each line that Compose refuses. The last line of a name counts."""
    found, problems, lines = {}, [], text.replace("\0", "\ufffd").splitlines()  # no path may hold the character 0
    number = 0
    while number < len(lines):
        line, place = lines[number], number + 1
        number += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (pair := _LINE.fullmatch(line)) is None:
            problems.append(f"line {place} is not NAME=VALUE")
            continue
        name, value = pair["name"], pair["value"].strip()
        quote = value[:1]
        if quote not in ("'", '"'):
            found[name] = re.sub(r"(?:^|\s)#.*", "", value).rstrip()
            continue
        rest = "\n".join((value[1:], *lines[number:]))
        if (end := _end_of(rest, quote)) < 0:
            problems.append(f"line {place}: the quote {quote} of {name} is not closed")
            break
        found[name] = rest[:end]
        number += found[name].count("\n")
    return found, problems


def _end_of(value: str, quote: str) -> int:
    place = value.find(quote)
    while place > 0 and value[place - 1] == "\\":
        place = value.find(quote, place + 1)
    return place
