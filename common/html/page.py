"""Renders a page as one file: without network access, with inline pictures, for light and dark mode, small screens and paper.

All values are escaped. The content security policy allows only the page's own style and script, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Undefined, UndefinedError
from markupsafe import Markup

from common.text import visible

UNKNOWN = "—"

_HERE = Path(__file__).parent
_MARKED = re.compile(r"<(svg|style|script|title)\b(?:[^<]++|<(?!/\1>))*+(?:</\1>)?+|<[^<>]*+>?+|(?P<name>⟨U\+[0-9A-F]{4,6}⟩)")
"""Matches the numbers of invisible characters, and the places where they stay unchanged: tags, and elements without HTML."""


def template_environment(folder: Path, **filters: Callable[..., object]) -> Environment:
    """Return an environment with the templates of a folder and of this package; `filters` are functions by name."""
    environment = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,  # for all names of files, unlike Jinja's `select_autoescape`
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment


def or_unknown(form: Callable[[Any], str]) -> Callable[[object], str]:
    """Return a filter that formats a value with `form`, and that returns a dash for None and for undefined names."""
    return lambda value: UNKNOWN if value is None or isinstance(value, Undefined) else form(value)


def render_page(
    environment: Environment, template: str, *, script: bool = False, program: Path | None = None, **values: object
) -> str:
    """Render an extension of `page.jinja`. With `script`, charts show values under the pointer. LookupError: a name is missing.

    `program` is a script that asks the server of the page; the file of its name with `.css` has its styles.
    """
    style, code = _read("style.css"), _read("hover.js") if script else ""
    if program is not None:
        style, code = style + program.with_suffix(".css").read_text(encoding="utf-8"), program.read_text(encoding="utf-8")
    allowed = {"style-src": _digest(style)} | ({"script-src": _digest(code)} if code else {})
    allowed |= {"connect-src": "'self'"} if program is not None else {}
    forbidden = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    policy = Markup("; ".join(f"{kind} {source}" for kind, source in (forbidden | allowed).items()))
    page = render_template(environment, template, policy=policy, style=Markup(style), script=Markup(code), **values)
    shown = _MARKED.sub(lambda found: f'<span class="unseen">{found[0]}</span>' if found["name"] else found[0], visible(page))
    return shown + "\n"


def render_template(environment: Environment, template: str, **values: object) -> str:
    """LookupError: a value that the template needs is missing."""
    try:
        return environment.get_template(template).render(**values)
    except UndefinedError as error:
        raise LookupError(f"{template}: {error}") from error


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
