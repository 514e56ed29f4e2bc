"""The frame of the pages about runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from common.html import page
from trainer.report.parts import Html

__all__ = ["render_page"]

_TEMPLATES = page.template_environment(Path(__file__).parent)


def render_page(title: str, introduction: object, first: object, sections: Mapping[str, Html]) -> str:
    """The whole page."""
    return page.render_page(
        _TEMPLATES, "page.jinja", script=True, title=title, introduction=introduction, first=first, sections=list(sections.items())
    )
