"""The report as one HTML file: no script, no network, pictures drawn inline; for light and dark, small screens, and paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports import html_documents, html_measures
from data_pipeline.reports.html_parts import Html, element, join, tag
from data_pipeline.reports.lookup import known

__all__ = ["render_report"]

_STYLE = Path(__file__).with_name("style.css")


def render_report(manifest: Manifest, timings: Mapping[str, Any] | None = None) -> str:
    """The page that shows prepared data to people; what its report lacks is left out.

    Args:
        manifest: with its root digest, which is why the page is not among the files that the digest covers.
        timings: what `Progress.summary` gave, which differ from run to run.
    """
    report, config = known(manifest.totals), manifest.config
    parts = {
        "Documents": html_documents.documents(report),
        "Sources": html_documents.sources(report),
        "Languages": html_documents.languages(report, (config.get("language") or {}).get("min_confidence")),
        "Lengths": html_measures.lengths(report, manifest.row_length),
        "Duplicates": html_documents.duplicates(report),
        "Quality": html_measures.quality(report),
        "Changes": html_documents.changes(report),
        "Tokenizer and validation": html_measures.tokenizer(report, manifest),
        "Rows": html_measures.rows(report, (config.get("packing") or {}).get("method")),
        "Rejected samples": html_documents.samples(report),
        "Throughput": html_documents.throughput(timings or {}),
        "Settings": html_documents.settings(manifest),
    }
    shown = {title: body for title, body in parts.items() if body}
    body = element(
        "body",
        element("header", element("h1", "Prepared data"), _digest(manifest), _contents(shown)),
        element("main", html_documents.tiles(report, manifest), *(_section(title, content) for title, content in shown.items())),
    )
    return f"<!DOCTYPE html>\n{element('html', _head(), body, lang='en')}\n"


def _head() -> Html:
    return element(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        element("title", "Prepared data"),
        element("style", Html(_STYLE.read_text(encoding="utf-8"))),
    )


def _digest(manifest: Manifest) -> Html:
    return element("p", "root digest ", element("code", manifest.root_digest))


def _contents(shown: Mapping[str, Html]) -> Html:
    return element("nav", *(join((element("a", title, href=f"#{_anchor(title)}"), " ")) for title in shown))


def _section(title: str, content: Html) -> Html:
    return element("section", element("h2", title), content, id=_anchor(title))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")
