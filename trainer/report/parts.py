"""The parts that a report's sections are made of: elements, tables, lists. What is not marked as HTML is escaped, always."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from common.text import visible

__all__ = ["NOTHING", "UNKNOWN", "Html", "code", "definitions", "element", "folded", "join", "note", "table", "tag", "text"]

_NAMED = re.compile(r"⟨U\+[0-9A-F]{4,6}⟩")


Html = Markup

NOTHING = Html("")
UNKNOWN = "—"
"""Stands where a number is not known."""


def text(value: object) -> Html:
    """`value` as HTML: markup is escaped, characters that cannot be seen are named and set off."""
    if isinstance(value, Html):
        return value
    return Html(_NAMED.sub(r'<span class="unseen">\g<0></span>', html.escape(visible(str(value)))))


def join(parts: Iterable[object]) -> Html:
    """The parts, one after the other."""
    return Html("".join(map(text, parts)))


def tag(name: str, /, **attributes: object) -> Html:
    """An opening tag; `class_` stands for `class`, `_` within a name for `-`, and an attribute that is None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>")


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element with its children."""
    return Html(f"{tag(name, **attributes)}{join(children)}</{name}>")


def code(value: object) -> Html:
    """Something that is to be read letter by letter."""
    return element("code", value)


def note(*children: object, alarm: bool = False) -> Html:
    """A paragraph; an alarm is set off."""
    return element("p", *children, class_="alarm" if alarm else None)


def folded(summary: object, *children: object) -> Html:
    """What only some will want to read."""
    return element("details", element("summary", summary), *children)


def table(
    columns: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    num_names: int = 1,
    marked: frozenset[int] = frozenset(),
) -> Html:
    """A table whose first `num_names` columns hold words and the others numbers; the rows with the indices `marked` are set off."""
    kinds = [None if place < num_names else "number" for place in range(len(columns))]
    head = join(element("th", name, class_=kind, scope="col") for name, kind in zip(columns, kinds, strict=True))
    body = join(
        element(
            "tr",
            *(element("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)),
            class_="marked" if index in marked else None,
        )
        for index, row in enumerate(rows)
    )
    whole = element("table", element("thead", element("tr", head)), element("tbody", body))
    return join((element("h3", title) if title else "", element("div", whole, class_="wide")))


def definitions(pairs: Mapping[str, object]) -> Html:
    """Names and what they are, one pair a line."""
    return element("dl", *(join((element("dt", name), element("dd", value))) for name, value in pairs.items()))
