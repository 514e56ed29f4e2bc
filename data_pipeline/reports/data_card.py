"""Renders the data card: what the prepared data contains, where it comes from, how it was prepared, and its limits, as Markdown.

The sections follow "Datasheets for Datasets" (Gebru et al., 2021) and the cards of the Hugging Face hub. Questions that the
preparation cannot answer, such as the licence, are lines for the user to fill in. The card contains no time, so equal data has an
equal card.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.html.page import UNKNOWN, or_unknown, template_environment
from common.settings.toml import to_toml
from common.text import decimal, share, size, visible
from data_pipeline.config import BUILTIN, PrepareConfig, portable_settings
from data_pipeline.config.prepare import OVERRIDABLE
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.reports.lengths import truncation_advice
from data_pipeline.reports.lookup import by_extension, flat, known, largest_first, part, round_trip

__all__ = ["render_card"]

_MAX_FILES = 20  # most input files listed for a source. The manifest lists all.

_MAX_EXTENSIONS = 40  # most lines in a table of reasons and extensions

_EMPTY: tuple[object, ...] = (None, {}, [], ())

_MARKUP = re.compile(r"[\\`*_{}\[\]()#+!|~$@^]|^-|(?<=:)/|(?<=www)\.", re.IGNORECASE)
"""Characters that Markdown, or a site that renders it, interprets as markup, a link or a formula."""
_ORDINAL = re.compile(r"^(\d+)\.(?=\s|$)")

Report = Mapping[str, Any]


def render_card(manifest: Manifest) -> str:
    """Return the data card of prepared data. The manifest must have its root digest. Parts that the report lacks are left out."""
    recipe = _recipe(manifest)
    values = [one for _, value in flat(recipe) for one in (value if isinstance(value, list) else [value])]
    named = [name for name in manifest.sources if name not in recipe.get("source", {})]
    sources = " --sources " + " ".join(shlex.quote(f"PATH/{visible(name)}") for name in named) if named else ""
    card = _TEMPLATES.get_template("data_card.jinja").render(
        manifest=manifest,
        report=known(manifest.totals),
        inputs={name: [entry for entry in manifest.inputs if entry.get("source") == name] for name in manifest.sources},
        steps=[Markup(step) for step in _steps(manifest.config)],
        recipe=to_toml("prepare", recipe).strip(),
        names_files=any(str(value).startswith("sha256:") for value in values),
        command=f"trainer prepare --recipe recipe.toml{sources} --output DIR",
    )
    return re.sub("\n{3,}", "\n\n", card).strip() + "\n"


def _steps(config: Report) -> list[str]:
    return [words for section, say in _IN_WORDS.items() if section in config and (words := say(config[section]))]


def _clean_in_words(clean: Report) -> str:
    most = f" to {clean['max_chars']:,}" if clean.get("max_chars") else " and more"
    form = "Unicode form NFC" if clean.get("unicode") == "nfc" else "Unicode not normalized"
    repaired = ", mojibake repaired" if clean.get("mojibake") else ""
    return (
        f"Cleaned: {form}{repaired}, control characters removed; documents of {clean.get('min_chars', 1):,}{most} characters kept."
    )


def _heuristics_in_words(heuristics: Report) -> str:
    parts = []
    for preset in heuristics.get("presets") or ():
        settings = {setting.name for setting in PRESETS[preset].settings} if preset in PRESETS else ()
        thresholds = {name.partition("_")[2]: value for name, value in heuristics.items() if name in settings}
        limits = ", ".join(f"{name.replace('_', ' ')} {_plain(value)}" for name, value in thresholds.items())
        parts.append(f"{_escaped(preset)} ({limits})")
    return f"Heuristics: {'; '.join(parts)}." if parts else ""


def _language_in_words(language: Report) -> str:
    if not language.get("identify", True):
        return "Languages: not identified, all kept."
    if not language.get("keep"):
        return "Languages: identified for prose and web text, all kept."
    kept = ", ".join(map(_escaped, language["keep"]))
    return f"Languages: {kept} kept if the identifier's confidence is at least {language.get('min_confidence')}."


def _dedup_in_words(dedup: Report) -> str:
    near = f"near copies (MinHash, at least {dedup.get('threshold')} of the runs of {dedup.get('shingle_words')} words in common)"
    kinds = [words for name, words in (("exact", "exact copies"), ("near", near)) if dedup.get(name)]
    words = f"Duplicates: {' and '.join(kinds)} removed, except the first in source order" if kinds else "Duplicates: kept"
    if dedup.get("benchmarks"):
        words += f"; texts that share {dedup.get('benchmark_words')} consecutive words with a benchmark removed"
    return f"{words}."


def _quality_in_words(quality: Report) -> str:
    words = []
    if quality.get("trusted") or quality.get("reference"):
        cuts = {name: quality.get(name) for name in ("min_perplexity", "max_perplexity")}
        cuts |= {name: quality.get(name) for name in ("min_perplexity_percentile", "max_perplexity_percentile")}
        parts = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in cuts.items() if value is not None)
        model = f"a model trained on {_escaped(quality['trusted'])}" if quality.get("trusted") else "the user's reference"
        words.append(f"perplexity under {model} ({parts or 'measured only'})")
    if quality.get("good"):
        words.append(f"a classifier trained on the user's examples (probability at least {quality.get('min_good_probability')})")
    return f"Quality: judged by {' and by '.join(words)}." if words else ""


def _augment_in_words(augment: Report) -> str:
    rates = {
        "subword_rate": "words cut into tokens at random",
        "fim_rate": "fill-in-the-middle of code",
        "synonym_rate": "words replaced by synonyms",
    }
    parts = [f"{words} ({share(augment[name])})" for name, words in rates.items() if augment.get(name)]
    return f"Augmented, only in training: {', '.join(parts)}." if parts else ""


def _sources_in_words(sources: Report) -> str:
    own = {
        name: ", ".join(
            f"{setting} {_plain(value)}" for setting, value in flat(source) if setting.split(".")[0] in OVERRIDABLE and value != {}
        )
        for name, source in sources.items()
    }
    parts = [f"{_escaped(name)} ({settings})" for name, settings in own.items() if settings]
    return f"Sources with their own settings: {'; '.join(parts)}." if parts else ""


def _settings_in_words(title: str, values: Report) -> str:
    off: tuple[object, ...] = (None, "none", False, [], {}, ())
    parts = [f"{name.replace('_', ' ')} {_plain(value)}" for name, value in values.items() if value not in off]
    return f"{title}: {', '.join(parts)}." if parts else ""


def _split_in_words(split: Report) -> str:
    how = "by the digest of their text" if split.get("by") == "content" else "from the end of each file"
    few = f" (at least {split['min_val_documents']} documents or, if fewer, a tenth)" if split.get("by") == "content" else ""
    return f"Split: {share(split.get('val_fraction', 0))} of the text held out for validation{few}, chosen {how}."


_IN_WORDS = {
    "clean": _clean_in_words,
    "heuristics": _heuristics_in_words,
    "language": _language_in_words,
    "dedup": _dedup_in_words,
    "quality": _quality_in_words,
    "balance": lambda values: _settings_in_words("Balance", values) if values.get("by") not in (None, "none") else "",
    "augment": _augment_in_words,
    "split": _split_in_words,
    "packing": lambda values: f"Packed: {values.get('method')}, documents longer than a row cut with one token of overlap.",
    "source": _sources_in_words,
}


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
    share=_or_blank(share),
    size=size,
)
_TEMPLATES.globals.update(
    by_extension=by_extension,
    largest_first=largest_first,
    max_extensions=_MAX_EXTENSIONS,
    max_files=_MAX_FILES,
    part=part,
    round_trip=round_trip,
    truncation_advice=truncation_advice,
)
