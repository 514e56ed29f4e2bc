"""The settings that shape the prepared bytes, which a manifest names, and those that only say where and how to run.

A manifest may come from a stranger. Preparing again with its settings takes only those that shape bytes: no engine,
no address, no worker count, no output, no source, and no file of this machine. Every new setting must be on one of these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FILES", "LOCAL", "SHAPING", "named_files", "portable_settings", "shaping_settings"]


def _names(section: str, names: str) -> list[str]:
    return [f"{section}.{name}" for name in names.split()]


SHAPING = (
    *("row_length", "partition_bytes"),
    *_names("text", "documents chunk_chars"),
    *_names("records", "text_field prompt_field prompt_end metadata quotes markup"),
    *_names("records", "label_field labels"),
    *_names("records", "messages_field chosen_field rejected_field"),
    *_names("chat", "template too_long"),
    *_names("html", "extract"),
    *_names("clean", "unicode mojibake drop_lines repeats repeat_window repeat_min_chars min_chars max_chars"),
    *_names("heuristics", "presets gopher_min_words gopher_max_words gopher_min_word_length gopher_max_word_length"),
    *_names("heuristics", "gopher_max_symbols gopher_max_bullet_lines gopher_max_ellipsis_lines gopher_min_alphabetic"),
    *_names("heuristics", "gopher_min_stop_words gopher_max_duplicate_lines gopher_max_duplicate_paragraphs"),
    *_names("heuristics", "gopher_max_duplicate_line_chars gopher_max_duplicate_paragraph_chars"),
    *_names("heuristics", "gopher_max_top_ngrams gopher_max_duplicate_ngrams"),
    *_names("heuristics", "c4_max_curly_brackets c4_max_lorem_ipsum c4_min_sentences c4_min_line_words"),
    *_names("heuristics", "fineweb_min_punctuated_lines fineweb_max_short_lines fineweb_short_line_chars"),
    *_names("heuristics", "fineweb_max_duplicate_line_chars fineweb_max_newlines"),
    *_names("heuristics", "spam_max_repeated spam_max_urls spam_max_digits spam_max_symbols spam_max_upper_case"),
    *_names("heuristics", "spam_max_keyword spam_max_blobs"),
    *_names("heuristics", "code_max_line_chars code_max_mean_line_chars code_min_alphanumeric code_max_generated"),
    *_names("language", "identify keep min_confidence sample_bytes"),
    *_names("dedup", "exact near threshold shingle_words num_hashes max_cluster alarm_fraction"),
    *_names("dedup", "benchmark_words benchmark_overlaps benchmark_alarm_fraction"),
    *_names("quality", "trusted reference_tokens reference_bits max_perplexity min_perplexity max_perplexity_percentile"),
    *_names("quality", "min_perplexity_percentile classifier_bits min_good_probability"),
    *_names("balance", "by field weights max_repeats"),
    *_names("augment", "seed subword_rate subword_alpha fim_rate fim_spm_rate synonym_rate"),
    *_names("split", "by val_fraction min_val_documents seed"),
    *_names("tokenizer", "kind vocab_size add_bos add_eos sample_bytes character_coverage train_threads extra_special"),
    *_names("tokenizer", "pad_token unk_token bos_token eos_token"),
    *_names("packing", "method keep_tokens window_tokens shard_bytes"),
    *_names("limits", "max_rejected_fraction max_bytes_per_source max_line_bytes max_document_bytes max_json_depth"),
    *_names("limits", "max_expansion max_decompressed_bytes max_window_bytes max_archive_members max_member_bytes"),
    *_names("limits", "reader_memory_bytes"),
    *_names("source.*", "kind weight max_bytes text records html clean heuristics language quality"),
)
"""Settings that shape bytes. A table `source.*.SECTION` holds settings of that section; only those on this list count."""

_LATER: Mapping[str, Any] = {
    "records.label_field": None,
    "records.labels": [],
    "records.messages_field": None,
    "records.chosen_field": None,
    "records.rejected_field": None,
    "chat.template": "none",
    "chat.too_long": "truncate",
}
"""Settings that were added later, with their defaults. A manifest leaves them out while they have these values, so that the
digests of all other data stay as they were."""

FILES = (
    "language.fasttext_model",
    "dedup.benchmarks",
    "quality.reference",
    "quality.good",
    "quality.bad",
    "augment.synonyms",
    "tokenizer.path",
)
"""Settings that shape bytes by the content of files. A manifest holds their digests, and no path is taken from it."""

LOCAL = (
    *("recipe", "sources", "output", "workers", "engine", "ray_address", "if_empty", "keep_rejects", "replace"),
    *("limits.outside_links", "limits.allowed_hosts", "limits.retries", "limits.retry_wait_s", "source.*.paths"),
)
"""Settings that say what is read and how the work is done. They are not in a manifest, and never taken from one."""

_EACH_SOURCE = "source.*."


def portable_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the prepared bytes, from the plain values of all settings."""
    changed = [name for name in (*SHAPING, *FILES) if name not in _LATER or _value(values, name) != _LATER[name]]
    return _picked(values, tuple(changed)) | {"source": _picked(values, SHAPING)["source"]}


def shaping_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a manifest that shape bytes."""
    return _picked(config, SHAPING)


def named_files(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings in a manifest that stand for files."""
    return [name for name in FILES if _values(config, name.partition(".")[0]).get(name.partition(".")[2])]


def _picked(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for name in names:
        section, _, leaf = name.rpartition(".")
        if not section and name in values:
            picked[name] = values[name]
        elif leaf in _values(values, section):
            picked.setdefault(section, {})[leaf] = values[section][leaf]
    sources = {name: _picked_of_source(own, names) for name, own in _values(values, "source").items() if isinstance(own, dict)}
    return {**picked, "source": sources}


def _picked_of_source(own: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for name in (name.removeprefix(_EACH_SOURCE) for name in names if name.startswith(_EACH_SOURCE)):
        if isinstance(own.get(name), dict):
            picked[name] = {leaf: value for leaf, value in own[name].items() if f"{name}.{leaf}" in names}
        elif name in own:
            picked[name] = own[name]
    return picked


def _value(values: Mapping[str, Any], name: str) -> Any:
    section, _, leaf = name.rpartition(".")
    return _values(values, section).get(leaf)


def _values(values: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = values.get(section)
    return found if isinstance(found, dict) else {}
