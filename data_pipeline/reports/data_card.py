"""Renders the data card as Markdown, after "Datasheets for Datasets" (Gebru et al., 2021) and the cards of the Hugging Face hub.

Questions that the preparation cannot answer are lines to fill in. It contains no time, so equal data has an equal card.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.html.page import UNKNOWN, or_unknown, render_template, template_environment
from common.settings.dotted import flatten
from common.settings.toml import to_toml
from common.text import decimal, share, size, visible
from data_pipeline.config import BUILTIN, PrepareConfig, portable_settings
from data_pipeline.config.prepare import OVERRIDABLE
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.reports.lengths import truncation_advice
from data_pipeline.reports.lookup import by_extension, known, largest_first, lookup, round_trip

_MAX_FILES = 20  # most input files listed for a source. The manifest lists all.

_MAX_EXTENSIONS = 40  # most lines in a table of reasons and extensions

_EMPTY: tuple[object, ...] = (None, {}, [], ())

_MARKUP = re.compile(r"[\\`*_{}\[\]()#+!|~$@^]|^-|(?<=:)/|(?<=www)\.", re.IGNORECASE)
"""Characters that Markdown, or a site that renders it, interprets as markup, a link or a formula."""
_ORDINAL = re.compile(r"^(\d+)\.(?=\s|$)")

Report = Mapping[str, Any]


def render_card(manifest: Manifest) -> str:
    """The manifest must have its root digest. Parts that the report lacks are left out."""
    recipe, report = _recipe(manifest), known(manifest.totals)
    values = [one for value in flatten(recipe).values() for one in (value if isinstance(value, list) else [value])]
    named = [name for name in manifest.sources if name not in recipe.get("source", {})]
    sources = " --sources " + " ".join(shlex.quote(f"PATH/{visible(name)}") for name in named) if named else ""
    card = render_template(
        _TEMPLATES,
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


def _thresholds(heuristics: Report, preset: str) -> list[tuple[str, object]]:
    settings = {setting.name for setting in PRESETS[preset].settings} if preset in PRESETS else ()
    return [(name.partition("_")[2], value) for name, value in heuristics.items() if name in settings]


def _overridden(source: Report) -> list[tuple[str, object]]:
    return [
        (name, value) for name, value in flatten(source, empty=True).items() if name.split(".")[0] in OVERRIDABLE and value != {}
    ]


def _recipe(manifest: Manifest) -> dict[str, Any]:
    """Return the settings that a recipe must contain, with placeholders for the paths of sources that have their own settings."""
    own = manifest.config.get("source", {})
    defaults = portable_settings(PrepareConfig(sources=(BUILTIN,)))
    recipe = _filled({name: value for name, value in manifest.config.items() if name != "source"}, defaults)
    order = dict.fromkeys(name for name in (*manifest.sources, *own) if name in own)
    sources: dict[str, Any] = {name: {"paths": ["PATH"]} for name in order}
    for name, source in sources.items():
        for section, value in own[name].items():
            if value in _EMPTY:
                continue
            if isinstance(value, Mapping):  # empty ones stay, because otherwise the settings of all sources would apply
                source[section] = {setting: _in_toml(one) for setting, one in value.items()}
            else:
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


def _most_first(counts: Report) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _or_blank(form: Callable[[Any], str]) -> Callable[[object], Markup]:
    """Return a filter that formats a value, and that returns "" for None and for undefined names."""
    known_form = or_unknown(form)
    return lambda value: Markup("" if (text := known_form(value)) == UNKNOWN else text)


_TEMPLATES = template_environment(
    Path(__file__).parent,
    code=lambda value: Markup(_code(value)),
    decimal=decimal,
    fenced=lambda text, language: Markup(_fenced(text, language)),
    md=lambda value: Markup(_escaped(value)),
    most_first=_most_first,
    number=_or_blank("{:,}".format),
    plain=lambda value: Markup(_plain(value)),
    share=_or_blank(share),
    size=size,
)
_TEMPLATES.globals.update(
    by_extension=by_extension,
    largest_first=largest_first,
    max_extensions=_MAX_EXTENSIONS,
    max_files=_MAX_FILES,
    overridden=_overridden,
    lookup=lookup,
    round_trip=round_trip,
    thresholds=_thresholds,
    sentence=lambda form, *values: Markup(form) % values,  # of a literal in the template; values are escaped
)
