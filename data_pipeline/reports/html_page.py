"""The report as one HTML file: no script, no network, pictures drawn inline; for light and dark, small screens, and paper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.html.page import render_page, template_environment
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports import html_documents, html_measures
from data_pipeline.reports.html_parts import element, join
from data_pipeline.reports.lookup import known

__all__ = ["render_report"]

_TEMPLATES = template_environment(Path(__file__).parent)


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
    introduction = join(("root digest ", element("code", manifest.root_digest)))
    first = html_documents.tiles(report, manifest)
    return render_page(
        _TEMPLATES, "page.jinja", title="Prepared data", introduction=introduction, first=first, sections=list(parts.items())
    )
