"""Renders the data card: what the prepared data contains, where it comes from, how it was prepared, and its limits, as Markdown.

The sections follow "Datasheets for Datasets" (Gebru et al., 2021) and the cards of the Hugging Face hub. Questions that the
preparation cannot answer, such as the licence, are lines for the user to fill in. The card contains no time, so equal data has an
equal card.
"""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from common.settings.toml import to_toml
from common.text import decimal, share, size, visible
from data_pipeline.config import BUILTIN, PrepareConfig, portable_settings
from data_pipeline.config.prepare import OVERRIDABLE
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.heuristics.presets import PRESETS
from data_pipeline.reports.lengths import truncation_advice
from data_pipeline.reports.lookup import by_extension, flat, known, largest_first, part, round_trip

__all__ = ["render_card"]

_TO_FILL = "not stated"
_QUESTIONS = ("Licence of the texts", "Intended use", "Uses to avoid", "Personal or sensitive content", "Contact")
_MAX_FILES = 20  # most input files listed for a source. The manifest lists all.

_MAX_EXTENSIONS = 40  # most lines in a table of reasons and extensions

_EMPTY: tuple[object, ...] = (None, {}, [], ())

_MARKUP = re.compile(r"[\\`*_{}\[\]()#+!|~$@^]|^-|(?<=:)/|(?<=www)\.", re.IGNORECASE)
"""Characters that Markdown, or a site that renders it, interprets as markup, a link or a formula."""
_ORDINAL = re.compile(r"^(\d+)\.(?=\s|$)")

Report = Mapping[str, Any]


def render_card(manifest: Manifest) -> str:
    """Return the data card of prepared data. The manifest must have its root digest. Parts that the report lacks are left out."""
    report = known(manifest.totals)
    sections = {
        "Summary": _summary(manifest, report),
        "Licence and use": "\n".join(f"- {question}: {_TO_FILL}" for question in _QUESTIONS),
        "Sources": _sources(manifest, report),
        "How it was prepared": _steps(manifest.config),
        "What was not read": _ignored(report),
        "What was removed": _removed(report),
        "Splits": _splits(report),
        "Labels": _labels(report),
        "Tokenizer": _tokenizer(manifest, report),
        "Lengths": _lengths(manifest, report),
        "Known limits": _limits(manifest, report),
        "How to reproduce": _reproduce(manifest),
    }
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items() if text)
    return f"# Data card\n\n{body}\n"


def _summary(manifest: Manifest, report: Report) -> str:
    counts, rows = part(report, "documents"), part(report, "rows")
    pairs = {
        "root digest": _code(manifest.root_digest),
        "documents": _of(counts, "kept", "read", "{:,} kept of {:,} read"),
        "text": _of(counts, "text_bytes", "input_bytes", "{} kept of {} input", size),
        "languages": ", ".join(_escaped(code) for code in largest_first(part(report, "languages"), "bytes")),
        "rows": ", ".join(f"{one['rows']:,} {_escaped(split)}" for split, one in rows.items() if "rows" in one),
        "tokens": ", ".join(f"{one['tokens']:,} {_escaped(split)}" for split, one in rows.items() if "tokens" in one),
        "row length": f"{manifest.row_length:,} tokens, stored as {manifest.token_type}",
        "shards": f"{len(manifest.shards):,} Arrow files, {size(sum(shard.bytes for shard in manifest.shards))}",
    }
    return _table(("", ""), [(name, value) for name, value in pairs.items() if value])


def _sources(manifest: Manifest, report: Report) -> str:
    overview, files = [], []
    for name in manifest.sources:
        inputs = [entry for entry in manifest.inputs if entry.get("source") == name]
        source = part(report, "sources", name)
        overview.append(
            (
                _escaped(name),
                _escaped(source.get("kind") or ""),
                f"{len(inputs):,}",
                size(sum(entry.get("bytes", 0) for entry in inputs)),
                _number(part(source, "documents"), "kept"),
                _number(source, "tokens"),
                share(source["share"]) if source.get("share") is not None else "",
            )
        )
        for entry in inputs[:_MAX_FILES]:
            checksum = _code(entry.get("sha256") or entry.get("checksum") or _TO_FILL)  # that of the store for an object in a store
            files.append(f"- {_escaped(name)}: {_code(entry.get('path'))}, {size(entry.get('bytes', 0))}, {checksum}")
        if len(inputs) > _MAX_FILES:
            files.append(f"- {_escaped(name)}: and {len(inputs) - _MAX_FILES:,} more, listed in `manifest.json`")
    if not overview:
        return ""
    head = ("source", "kind", "files", "size", "documents kept", "tokens", "share of training tokens")
    return "\n\n".join((_table(head, overview, numbers=5), "\n".join(files)))


def _steps(config: Report) -> str:
    steps = [words for section, say in _IN_WORDS.items() if section in config and (words := say(config[section]))]
    return "\n".join(f"{number}. {words}" for number, words in enumerate(steps, start=1))


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


def _ignored(report: Report) -> str:
    if "ignored" not in report:
        return ""
    tables = {
        "These files of the sources were ignored. Hidden files are not counted.": ("ignored", "files"),
        "These documents could not be read:": ("malformed", "documents"),
    }
    parts = [f"{title}\n\n{_by_extension(report, *names)}" for title, names in tables.items() if part(report, names[0])]
    return "\n\n".join(parts) or "Every file of the sources was read."


def _by_extension(report: Report, name: str, unit: str) -> str:
    found = by_extension(report, name)
    lines = [(_escaped(reason), _escaped(extension), f"{count:,}") for reason, extension, count in found[:_MAX_EXTENSIONS]]
    more = f"\n\nThe other {len(found) - len(lines):,} lines are in `report.json`." if len(found) > len(lines) else ""
    return _table(("reason", "extension", unit), lines, numbers=1) + more


def _removed(report: Report) -> str:
    counts = part(report, "documents")
    read = counts.get("read") or 0
    lines = [
        (_escaped(stage), _escaped(reason), f"{count:,}", share(count / read) if read else "")
        for stage, lost in part(report, "rejected").items()
        for reason, count in sorted(lost.items(), key=lambda item: (-item[1], item[0]))
    ]
    if not lines:
        return "No document was rejected." if counts.get("rejected") == 0 else ""
    total = _of(counts, "read", "kept", "Of {:,} documents {:,} were kept. The others were rejected for one reason each:")
    cleaned = sorted(part(report, "cleaned").items(), key=lambda item: (-item[1], item[0]))
    changed = [(_escaped(rule), f"{count:,}") for rule, count in cleaned]
    parts = [total, _table(("stage", "reason", "documents", "share of all read"), lines, numbers=2)]
    if changed:
        title = "Documents that cleaning changed, including those that were rejected later:"
        parts += [title, _table(("rule", "documents"), changed, numbers=1)]
    return "\n\n".join(part for part in parts if part)


def _splits(report: Report) -> str:
    names = ("documents", "rows", "tokens", "targets", "fill_rate", "cut_rate")
    lines = [
        (_escaped(split), *(share(one[name]) if name.endswith("_rate") else f"{one[name]:,}" for name in names))
        for split, one in part(report, "rows").items()
        if set(names) <= one.keys()
    ]
    parts = [_table(("split", *(name.replace("_", " ") for name in names)), lines, numbers=len(names))] if lines else []
    shares = {split: one["loss_share"] for split, one in part(report, "rows").items() if one.get("loss_share") is not None}
    if shares:
        words = ", ".join(f"{share(value)} of {_escaped(split)}" for split, value in shares.items())
        parts.append(f"Prompts have no loss. Share of tokens with a loss, among all that could be predicted: {words}.")
    if chats := part(report, "conversations"):
        numbers = ", ".join(f"{count:,} {_escaped(name.replace('_', ' '))}" for name, count in chats.items())
        parts.append(f"Conversations or preference pairs, and those that did not fit into a row: {numbers}.")
    parts.append("`trainer leaks DIR` counts copies of validation documents in training.")
    return "\n\n".join(parts)


def _labels(report: Report) -> str:
    found = part(report, "labels", "documents")
    lines = [(_escaped(name), _number(counts, "train"), _number(counts, "val")) for name, counts in found.items()]
    if not lines:
        return ""
    words = "The number of documents with each label. A document with more tokens than a row has is cut to the row."
    return f"{words}\n\n{_table(('label', 'training', 'validation'), lines, numbers=2)}"


def _tokenizer(manifest: Manifest, report: Report) -> str:
    lines = [f"{_escaped(manifest.tokenizer_kind)}, {manifest.vocab_size:,} tokens, {_code(manifest.tokenizer_digest)}."]
    if words := round_trip(part(report, "tokenizer")):
        lines[0] += f" {words[0].upper()}{words[1:]}."
    by_language = [
        (_escaped(code), _number(one, "documents"), _number(one, "tokens"), decimal(one.get("bytes_per_token") or 0))
        for code, one in largest_first(part(report, "languages"), "bytes").items()
    ]
    if by_language:
        lines.append(_table(("language", "documents", "tokens", "bytes per token"), by_language, numbers=3))
    return "\n\n".join(lines)


def _lengths(manifest: Manifest, report: Report) -> str:
    names = ("mean", "p50", "p90", "p95", "p99", "max")
    found = {unit: part(report, "lengths", unit) for unit in ("characters", "tokens")}
    lines = [(unit, *(decimal(one[name]) for name in names)) for unit, one in found.items() if set(names) <= one.keys()]
    table = _table(("a document's length in", "mean", "P50", "P90", "P95", "P99", "longest"), lines, numbers=6) if lines else ""
    advice = truncation_advice(report.get("truncation") or [], manifest.row_length)
    return "\n\n".join(part for part in (table, advice) if part)


def _limits(manifest: Manifest, report: Report) -> str:
    config = manifest.config
    limits = [
        f"Source {_escaped(name)} lost a larger share of its documents to duplicates than `dedup.alarm_fraction`."
        for name in part(report, "duplicates").get("alarms") or ()
    ]
    limits += [
        f"Source {_escaped(name)} lost a larger share of its text to benchmarks than `dedup.benchmark_alarm_fraction`."
        for name in part(report, "duplicates").get("benchmark_alarms") or ()
    ]
    if not part(config, "language").get("identify", True):
        limits.append("Languages were not identified.")
    if not part(config, "dedup").get("near", True):
        limits.append("Near duplicates were not removed.")
    limits += [
        "Texts were not checked for truth, bias, toxicity, or personal data.",
        "Filters are rules and small models, so some good texts are missing and some bad ones remain. `report.html` shows samples.",
    ]
    return "\n".join(f"- {limit}" for limit in limits)


def _reproduce(manifest: Manifest) -> str:
    """Return the settings as a recipe, and the command. Prepared data contains no paths, so the reader fills in placeholders."""
    recipe = _recipe(manifest)
    named = [name for name in manifest.sources if name not in recipe.get("source", {})]
    files = any(str(value).startswith("sha256:") for _, one in flat(recipe) for value in (one if isinstance(one, list) else [one]))
    sources = " --sources " + " ".join(shlex.quote(f"PATH/{visible(name)}") for name in named) if named else ""
    return "\n\n".join(
        (
            "Use the input files listed above and these settings in `recipe.toml`. Replace each PATH by the path of a source (the "
            "word `builtin` stands for the sources `stdlib-code` and `stdlib-manual`)"
            + (" and each digest by the path of a file with that digest:" if files else ":"),
            _fenced(to_toml("prepare", recipe).strip(), "toml"),
            _fenced(f"trainer prepare --recipe recipe.toml{sources} --output DIR", "sh"),
            f"The last line of the output must be {_code(f'root digest {manifest.root_digest}')}. "
            "`trainer verify-data DIR` checks it.",
        )
    )


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


def _table(head: Sequence[str], lines: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """Return a Markdown table whose last `numbers` columns are right-aligned. The cells must be Markdown already."""
    rule = ["---"] * (len(head) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


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


def _of(values: Report, first: str, second: str, words: str, form: Callable[[Any], object] = int) -> str:
    """Return a sentence about two numbers; "" if one is unknown."""
    return words.format(form(values[first]), form(values[second])) if {first, second} <= values.keys() else ""


def _number(values: Report, name: str) -> str:
    return f"{values[name]:,}" if values.get(name) is not None else ""
