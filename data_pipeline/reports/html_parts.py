"""The parts that the report's sections are made of: elements, tables, bars. What is not marked as HTML is escaped, always."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence

from markupsafe import Markup

from common.text import visible

__all__ = ["Html", "bar", "definitions", "element", "join", "note", "number_table", "tag", "text"]

_NAMED = re.compile(r"⟨U\+[0-9A-F]{4,6}⟩")


Html = Markup


def text(value: object) -> Html:
    """`value` as HTML: markup is escaped, characters that cannot be seen are named and set off."""
    if isinstance(value, Html):
        return value
    return Html(_NAMED.sub(r'<span class="unseen">\g<0></span>', html.escape(visible(str(value)))))


def join(parts: Iterable[object]) -> Html:
    """The parts, one after the other."""
    return Html("".join(map(text, parts)))


def tag(name: str, /, **attributes: object) -> Html:
    """An opening tag; `class_` stands for `class`, `_` for `-`, and an attribute that is None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>")


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element with its children."""
    return Html(f"{tag(name, **attributes)}{join(children)}</{name}>")


def note(*children: object, alarm: bool = False) -> Html:
    """A paragraph that says what the numbers mean; an alarm is set off."""
    return element("p", *children, class_="alarm" if alarm else None)


def bar(part: float, kind: str = "kept") -> Html:
    """A bar of this share (0 to 1) of its cell's width."""
    width = f"{100 * min(max(part, 0.007), 1):.2f}"  # an attribute, which the content security policy allows, unlike a style
    return element(
        "svg", element("rect", width=width, height=1, class_=kind), class_="bar", viewBox="0 0 100 1", preserveAspectRatio="none"
    )


def number_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", num_names: int = 1, marked: int | None = None
) -> Html:
    """A table whose first `num_names` columns hold words and the others numbers; the row with the index `marked` is set off."""
    aligned = [None if place < num_names else "number" for place in range(len(columns))]
    head = join(element("th", name, class_=kind, scope="col") for name, kind in zip(columns, aligned, strict=True))
    body = join(
        element(
            "tr",
            *(element("td", cell, class_=kind) for cell, kind in zip(row, aligned, strict=True)),
            class_="marked" if index == marked else None,
        )
        for index, row in enumerate(rows)
    )
    table = element("table", element("thead", element("tr", head)), element("tbody", body))
    return join((element("h3", title) if title else "", element("div", table, class_="wide")))


def definitions(pairs: Mapping[str, object]) -> Html:
    """Names and what they are, one pair a line."""
    return element("dl", *(join((element("dt", name), element("dd", value))) for name, value in pairs.items()))
