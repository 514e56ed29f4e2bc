from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.html.drawing import Bin, draw_histogram
from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from common.settings.dotted import flatten
from common.text import decimal, duration, share, size
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.reports.lengths import PERCENTS, truncation_advice
from data_pipeline.reports.lookup import by_extension, known, largest_first, lookup, round_trip

Report = Mapping[str, Any]

_MAX_CUTS = 3  # most sources whose thresholds are marked
_MAX_LISTED = 40  # most sources or languages in a table. The page says how many more there are.


def render_report(manifest: Manifest, timings: Mapping[str, Any] | None = None) -> str:
    """Return the page about prepared data. Parts that the report lacks are left out. `timings` are from `Progress.summary`."""
    report, config = known(manifest.totals), manifest.config
    return render_page(
        _TEMPLATES,
        "html_page.jinja",
        manifest=manifest,
        report=report,
        num_tokens=lookup(report, "lengths", "tokens").get("total", 0),
        stages=report.get("stages") or [{"name": name, "rejected": lost} for name, lost in lookup(report, "rejected").items()],
        balance=_balance(lookup(report, "sources")),
        confidence=_confidence(report, (config.get("language") or {}).get("min_confidence")),
        length_charts=_length_charts(report),
        perplexity_chart=_perplexity_chart(report),
        packing_method=(config.get("packing") or {}).get("method"),
        rejected_samples=list(_rejected_samples(report)),
        timed=(timings or {}).get("stages") or [],
        settings=list(flatten(config, empty=True).items()),
    )


def _length_charts(report: Report) -> list[Markup]:
    found = {unit: lookup(report, "lengths", unit) for unit in ("characters", "tokens")}
    return [_length_chart(unit, one) for unit, one in found.items() if one.get("histogram")]


def _length_chart(unit: str, found: Report) -> Markup:
    def words(one: Bin) -> str:
        last = f" to {one.high - 1:,.0f}" if one.high - one.low > 1 else ""
        return f"{one.low:,.0f}{last} {unit}: {one.counts[0]:,} documents, {one.counts[1]:,} {unit}"

    bins = [Bin(low, high, (count, units)) for low, high, count, units in found["histogram"]]
    marks = {f"P{percent}": found[f"p{percent}"] for percent in PERCENTS if f"p{percent}" in found}
    return draw_histogram(bins, ("documents", unit), f"{unit} in a document", marks, words)


def _perplexity_chart(report: Report) -> Markup:
    found = lookup(report, "perplexity")
    if not found.get("histogram"):
        return Markup()

    def words(one: Bin) -> str:
        return f"{decimal(one.low)} to {decimal(one.high)}: {one.counts[0]:,} documents"

    marks: dict[str, float] = {}
    cuts = lookup(found, "thresholds")
    for key in ("min", "max"):
        values = {name: one[key] for name, one in cuts.items() if key in one}
        if len(set(values.values())) == 1:
            marks[f"{key} {decimal(next(iter(values.values())))}"] = next(iter(values.values()))
        else:
            marks |= {f"{key} {name}": value for name, value in list(values.items())[:_MAX_CUTS]}
    bins = [Bin(low, high, (count,)) for low, high, count in found["histogram"]]
    return draw_histogram(bins, ("documents",), "perplexity of a document", marks, words)


def _balance(sources: Mapping[str, Report]) -> list[tuple[str, Report, float]]:
    """Return the sources that have a weight, each with the share of the training tokens that its weight requests."""
    weighted = {name: source for name, source in sources.items() if source.get("weight") is not None and "share" in source}
    total = sum(source["weight"] for source in weighted.values()) or 1
    return [(name, source, source["weight"] / total) for name, source in weighted.items()]


def _confidence(report: Report, wanted: float | None) -> tuple[list[str], list[list[str]]]:
    found = largest_first(lookup(report, "language_confidence"), "all")
    thresholds = sorted({name for kept in found.values() for name in kept if name != "all"}, key=float)
    heads = [f"{name} (set)" if wanted is not None and float(name) == wanted else name for name in thresholds]
    rows = []
    for language, kept in _listed(found).items():
        num_documents = kept.get("all", 0)
        shares = (share(kept.get(name, 0) / max(num_documents, 1)) for name in thresholds)
        rows.append([language, f"{num_documents:,}", *shares])
    return heads, rows


def _rejected_samples(report: Report) -> Iterator[tuple[str, str, int | None, list[Report]]]:
    """Yield stage, reason, number of rejected documents, and the samples, in the order of the stages."""
    counts = {(stage, reason): count for stage, lost in lookup(report, "rejected").items() for reason, count in lost.items()}
    places = {place: number for number, place in enumerate(counts)}

    def reason_of(sample: Report) -> tuple[str, str]:
        return sample.get("stage", ""), sample.get("reason", "")

    found = sorted(report.get("samples") or [], key=lambda sample: (places.get(reason_of(sample), len(places)), reason_of(sample)))
    for (stage, reason), group in groupby(found, key=reason_of):
        yield stage, reason, counts.get((stage, reason)), list(group)


def _listed(found: Mapping[str, Any]) -> dict[str, Any]:
    return dict(list(found.items())[:_MAX_LISTED])


def _worded(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None or value == {} else str(value)


def _short(value: int) -> str:
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:,}" if value else UNKNOWN


_TEMPLATES = template_environment(
    Path(__file__).parent,
    at_least=max,
    at_most=min,
    count=or_unknown("{:,}".format),
    decimal=or_unknown(decimal),
    duration=duration,
    exact_share=or_unknown(lambda value: f"{100 * value:.3f} %"),
    listed=_listed,
    one_line=lambda text: " ".join(str(text or "").split())[:120],
    share=or_unknown(share),
    short=_short,
    size=or_unknown(size),
    worded=_worded,
)
_TEMPLATES.globals.update(
    by_extension=by_extension,
    flat=lambda values: flatten(values, empty=True).items(),
    largest_first=largest_first,
    max_listed=_MAX_LISTED,
    lookup=lookup,
    round_trip=round_trip,
    truncation_advice=truncation_advice,
)
