"""A hook of mkdocs: a link to a file outside of docs/ becomes the name of this file, because the site has no page for it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_others: Any) -> str:
    """Return the text of a page for the site."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, page: str) -> str:
    """Return the text of the page at this path below docs/, with `name` in place of each link that leads out of docs/."""

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        return (
            f"{text} (`{outside}`)"
            if (outside := _outside(target.partition("#")[0], page)) and outside not in text
            else (f"`{outside}`" if outside else match[0])
        )

    return _LINK.sub(replaced, markdown)


def _outside(target: str, page: str) -> str:
    """Return the path in the repository to which a link leads, if that is outside of docs/; else nothing."""
    if "://" in target or not target:
        return ""
    parts: list[str] = []
    for part in (*PurePosixPath("docs", page).parent.parts, *PurePosixPath(target).parts):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "" if parts[0] == "docs" else "/".join(parts)
