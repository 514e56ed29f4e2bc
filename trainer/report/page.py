"""A page around its sections: one file, no network, pictures drawn inline; for light and dark, small screens, and paper.

The page forbids itself, by a content security policy, everything but its own style and script, which are named by their digests. So
even markup that got past the escaping could load nothing and run nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from trainer.report.parts import Html, element, join, tag

__all__ = ["render_page"]

_STYLE = Path(__file__).with_name("style.css")
_SCRIPT = Path(__file__).with_name("hover.js")


def render_page(title: str, introduction: object, first: object, sections: Mapping[str, Html]) -> str:
    """The whole page.

    Args:
        title: its heading.
        introduction: what stands below that.
        first: what is seen before all sections.
        sections: by their headings; those without content are left out.
    """
    shown = {heading: content for heading, content in sections.items() if content}
    body = element(
        "body",
        element("header", element("h1", title), element("p", introduction), _contents(shown)),
        element("main", first, *(_section(heading, content) for heading, content in shown.items())),
        element("script", Html(_read(_SCRIPT))),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(title), body, lang='en')}\n"


def _head(title: str) -> Html:
    allowed = {"style-src": _digest(_read(_STYLE)), "script-src": _digest(_read(_SCRIPT))}
    forbidden = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    policy = "; ".join(f"{kind} {source}" for kind, source in (forbidden | allowed).items())
    return element(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(_read(_STYLE))),
    )


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _contents(shown: Mapping[str, Html]) -> Html:
    return element("nav", *(join((element("a", heading, href=f"#{_anchor(heading)}"), " ")) for heading in shown))


def _section(heading: str, content: Html) -> Html:
    return element("section", element("h2", heading), content, id=_anchor(heading))


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-").replace(",", "")
