"""Renders the report of prepared data as a page (HTML) and as a data card (Markdown), each from its template.

The card follows "Datasheets for Datasets" (Gebru et al., 2021) and the cards of the Hugging Face hub. Questions that the
preparation cannot answer are lines to fill in. It contains no time, so equal data has an equal card.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.html.drawing import Bin, draw_histogram
from common.html.page import UNKNOWN, or_unknown, render_page, render_template, template_environment
from common.settings.dotted import flatten, to_toml
from common.text import decimal, duration, share, size, visible
from data_pipeline.config import BUILTIN, PrepareConfig, portable_settings
from data_pipeline.config.prepare import OVERRIDABLE
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.reports.facts import by_extension, known, largest_first, lookup, round_trip, truncation_advice
from data_pipeline.reports.lengths import PERCENTS

Report = Mapping[str, Any]

# The page

_MAX_CUTS = 3  # most sources whose thresholds are marked
_MAX_LISTED = 40  # most sources or languages in a table. The page says how many more there are.


def render_report(manifest: Manifest, timings: Mapping[str, Any] | None = None) -> str:
    """Return the page about prepared data. Parts that the report lacks are left out. `timings` are from `Progress.summary`."""
    report, config = known(manifest.totals), manifest.config
    weighted = {name: one for name, one in lookup(report, "sources").items() if one.get("weight") is not None and "share" in one}
    total = sum(source["weight"] for source in weighted.values()) or 1
    return render_page(
        _PAGE,
        "html_page.jinja",
        manifest=manifest,
        report=report,
        num_tokens=lookup(report, "lengths", "tokens").get("total", 0),
        stages=report.get("stages") or [{"name": name, "rejected": lost} for name, lost in lookup(report, "rejected").items()],
        balance=[(name, source, source["weight"] / total) for name, source in weighted.items()],
        confidence=_confidence(report, (config.get("language") or {}).get("min_confidence")),
        length_charts=list(_length_charts(report)),
        perplexity_chart=_perplexity_chart(report),
        packing_method=(config.get("packing") or {}).get("method"),
        rejected_samples=list(_rejected_samples(report)),
        timed=(timings or {}).get("stages") or [],
        settings=list(flatten(config, empty=True).items()),
    )


def _length_charts(report: Report) -> Iterator[Markup]:
    for unit in ("characters", "tokens"):
        found = lookup(report, "lengths", unit)

        def words(one: Bin, unit: str = unit) -> str:
            last = f" to {one.high - 1:,.0f}" if one.high - one.low > 1 else ""
            return f"{one.low:,.0f}{last} {unit}: {one.counts[0]:,} documents, {one.counts[1]:,} {unit}"

        if found.get("histogram"):
            bins = [Bin(low, high, (count, units)) for low, high, count, units in found["histogram"]]
            marks = {f"P{percent}": found[f"p{percent}"] for percent in PERCENTS if f"p{percent}" in found}
            yield draw_histogram(bins, ("documents", unit), f"{unit} in a document", marks, words)


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


_FUNCTIONS = {
    "by_extension": by_extension,
    "largest_first": largest_first,
    "lookup": lookup,
    "round_trip": round_trip,
    "truncation_advice": truncation_advice,
}
_PAGE = template_environment(
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
_PAGE.globals.update(_FUNCTIONS, flat=lambda values: flatten(values, empty=True).items(), max_listed=_MAX_LISTED)

# The data card

_MAX_FILES = 20  # most input files listed for a source. The manifest lists all.
_MAX_EXTENSIONS = 40  # most lines in a table of reasons and extensions
_EMPTY: tuple[object, ...] = (None, {}, [], ())
# Characters that Markdown, or a site that renders it, interprets as markup, a link or a formula.
_MARKUP = re.compile(r"[\\`*_{}\[\]()#+!|~$@^]|^-|(?<=:)/|(?<=www)\.", re.IGNORECASE)
_ORDINAL = re.compile(r"^(\d+)\.(?=\s|$)")


def render_card(manifest: Manifest) -> str:
    """The manifest must have its root digest. Parts that the report lacks are left out."""
    recipe, report = _recipe(manifest), known(manifest.totals)
    values = [one for value in flatten(recipe).values() for one in (value if isinstance(value, list) else [value])]
    named = [name for name in manifest.sources if name not in recipe.get("source", {})]
    sources = " --sources " + " ".join(shlex.quote(f"PATH/{visible(name)}") for name in named) if named else ""
    card = render_template(
        _CARD,
        "data_card.jinja",
        manifest=manifest,
        report=report,
        advice=Markup(truncation_advice(report.get("truncation") or [], manifest.row_length)),
        inputs={name: [entry for entry in manifest.inputs if entry.get("source") == name] for name in manifest.sources},
        recipe=to_toml("prepare", recipe).strip(),
        names_files=any(str(value).startswith("sha256:") for value in values),
        command=f"trainer prepare --recipe recipe.toml{sources} --output DIR",
    )
    return re.sub("\n{3,}", "\n\n", card).strip() + "\n"


def _recipe(manifest: Manifest) -> dict[str, Any]:
    """Return the settings that a recipe must contain, with placeholders for the paths of sources that have their own settings."""
    own = manifest.config.get("source", {})
    defaults = portable_settings(PrepareConfig(sources=(BUILTIN,)))
    recipe = _filled({name: value for name, value in manifest.config.items() if name != "source"}, defaults)
    order = dict.fromkeys(name for name in (*manifest.sources, *own) if name in own)
    sources: dict[str, Any] = {name: {"paths": ["PATH"]} for name in order}
    for name, source in sources.items():
        for section, value in own[name].items():
            if isinstance(value, Mapping) and value:  # empty ones stay, because otherwise the settings of all sources would apply
                source[section] = {setting: _in_toml(one) for setting, one in value.items()}
            elif value not in _EMPTY:
                source[section] = value
    return recipe | ({"source": sources} if sources else {})


def _filled(values: Report, defaults: Report) -> dict[str, Any]:
    """Return the settings without those that are empty and also empty by default."""
    filled = {
        name: _filled(value, defaults.get(name) or {}) if isinstance(value, Mapping) else _in_toml(value)
        for name, value in values.items()
        if value not in _EMPTY or defaults.get(name) not in _EMPTY
    }
    return {name: value for name, value in filled.items() if value != {}}


def _in_toml(value: object) -> object:
    return "none" if value is None else value


def _escaped(value: object) -> str:
    """Return text that Markdown shows unchanged, also in a table cell, whatever it contains."""
    flat = " ".join(visible(str(value)).split())
    return html.escape(_ORDINAL.sub(r"\1\\.", _MARKUP.sub(r"\\\g<0>", flat)), quote=False)


def _code(value: object) -> str:
    """Return text as inline code. Backticks in it cannot end the code, and a bar cannot end a table cell."""
    flat = " ".join(visible(str(value)).split()).replace("|", "⟨U+007C⟩").replace("`", "⟨U+0060⟩")
    return f"`{flat}`"


def _fenced(text: str, language: str) -> str:
    """Return a block of code with a fence that is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _plain(value: object) -> str:
    return _escaped((", ".join(map(str, value)) or "empty") if isinstance(value, list | tuple) else _in_toml(value))


def _or_blank(form: Callable[[Any], str]) -> Callable[[object], Markup]:
    """Return a filter that formats a value, and that returns "" for None and for undefined names."""
    known_form = or_unknown(form)
    return lambda value: Markup("" if (text := known_form(value)) == UNKNOWN else text)


_CARD = template_environment(
    Path(__file__).parent,
    code=lambda value: Markup(_code(value)),
    decimal=decimal,
    fenced=lambda text, language: Markup(_fenced(text, language)),
    md=lambda value: Markup(_escaped(value)),
    most_first=lambda counts: sorted(counts.items(), key=lambda item: (-item[1], item[0])),
    number=_or_blank("{:,}".format),
    plain=lambda value: Markup(_plain(value)),
    share=_or_blank(share),
    size=size,
)
_CARD.globals.update(
    _FUNCTIONS,
    max_extensions=_MAX_EXTENSIONS,
    max_files=_MAX_FILES,
    overridden=lambda source: [
        (name, value) for name, value in flatten(source, empty=True).items() if name.split(".")[0] in OVERRIDABLE and value != {}
    ],
    sentence=lambda form, *values: Markup(form) % values,  # of a literal in the template; values are escaped
    thresholds=lambda heuristics, preset: [
        (name.partition("_")[2], value)
        for name, value in heuristics.items()
        if preset in PRESETS and name in PRESETS[preset].settings
    ],
)
