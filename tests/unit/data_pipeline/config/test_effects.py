from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig, settings_without_effect


def told(**changes: Any) -> list[str]:
    changes = changes if "source" in changes else {"sources": ("texts",)} | changes
    return [text.partition(" has no effect: it needs ")[0] for text in settings_without_effect(PrepareConfig(**changes))]


def test_the_defaults_have_no_setting_without_effect() -> None:
    assert told() == []


@pytest.mark.parametrize(
    ("changes", "partner", "name"),
    [
        ({"language": {"min_confidence": 0.5}}, {"language": {"keep": ["en"]}}, "language.min_confidence"),
        ({"language": {"sample_bytes": 300}}, None, "language.sample_bytes"),
        ({"quality": {"max_perplexity": 50}}, {"quality": {"trusted": "texts"}}, "quality.max_perplexity"),
        ({"quality": {"max_perplexity": 50}}, {"quality": {"reference": "good.txt"}}, "quality.max_perplexity"),
        ({"quality": {"reference_bits": 20}}, {"quality": {"reference": "good.txt"}}, "quality.reference_bits"),
        ({"records": {"prompt_end": " "}}, {"records": {"prompt_field": "question"}}, "records.prompt_end"),
        ({"quality": {"min_good_probability": 0.9}}, {"quality": {"good": ["a"], "bad": ["b"]}}, "quality.min_good_probability"),
        ({"dedup": {"benchmark_words": 8}}, {"dedup": {"benchmarks": ["a"]}}, "dedup.benchmark_words"),
        ({"dedup": {"benchmark_alarm_fraction": 0.2}}, {"dedup": {"benchmarks": ["a"]}}, "dedup.benchmark_alarm_fraction"),
        ({"balance": {"max_repeats": 3}}, {"balance": {"by": "kind"}}, "balance.max_repeats"),
        ({"balance": {"weights": {"web": 3}}}, {"balance": {"by": "kind"}}, "balance.weights"),
        ({"augment": {"synonyms": Path("a")}}, {"augment": {"synonym_rate": 0.1}}, "augment.synonyms"),
        ({"augment": {"fim_spm_rate": 0.1}}, {"augment": {"fim_rate": 0.1}}, "augment.fim_spm_rate"),
        ({"augment": {"subword_alpha": 0.2}}, {"augment": {"subword_rate": 0.1}}, "augment.subword_alpha"),
        ({"text": {"chunk_chars": 100}}, {"text": {"documents": "chunks"}}, "text.chunk_chars"),
        ({"clean": {"repeat_min_chars": 5}}, {"clean": {"repeat_window": 5}}, "clean.repeat_min_chars"),
        ({"ray_address": "ray://here"}, {"engine": "ray"}, "ray_address"),
    ],
)
def test_a_setting_without_its_partner_is_told_and_with_it_not(
    changes: dict[str, Any], partner: dict[str, Any] | None, name: str
) -> None:
    lacking = {"language": {"identify": False}} if partner is None else {}
    section = name.partition(".")[0]
    with_lacking = {section: lacking.get(section, {}) | changes[section]} if lacking else changes
    assert told(**with_lacking) == [name]
    for key, value in (partner or {}).items():
        changes = {**changes, key: {**changes.get(key, {}), **value} if isinstance(value, dict) else value}
    assert told(**changes) == []


@pytest.mark.parametrize(("kind", "has_effect"), [("bpe", True), ("unigram", True), ("char", False), ("byte", False)])
def test_the_size_of_a_vocabulary_counts_where_it_is_trained(kind: str, has_effect: bool) -> None:
    assert told(tokenizer={"kind": kind, "vocab_size": 300}) == ([] if has_effect else ["tokenizer.vocab_size"])
    assert told(tokenizer={"kind": "bpe", "vocab_size": 300, "path": "a.json"}) == ["tokenizer.vocab_size"]


def test_a_threshold_has_an_effect_under_its_preset_alone() -> None:
    for preset, name in (
        ("gopher-quality", "gopher_min_words"),
        ("gopher-repetition", "gopher_max_duplicate_lines"),
        ("c4", "c4_min_sentences"),
    ):
        value = {"gopher_min_words": 1, "gopher_max_duplicate_lines": 0.9, "c4_min_sentences": 1}[name]
        for chosen in ("gopher-quality", "gopher-repetition", "c4"):
            expected = [] if chosen == preset else [f"heuristics.{name}"]
            assert told(heuristics={"presets": [chosen], name: value}) == expected


def test_a_weight_counts_if_sources_are_balanced() -> None:
    source = {"web": {"paths": ("a",), "weight": 2.0}, "books": {"paths": ("b",)}}
    assert told(source=source) == ["source.web.weight"]
    assert told(source=source, balance={"by": "source"}) == []


def test_a_section_that_sources_override_is_judged_for_each_of_them() -> None:
    code = {"paths": ("a",), "heuristics": {"presets": ["code"]}}
    prose = {"paths": ("b",)}
    assert told(source={"code": code, "prose": prose}, heuristics={"code_max_generated": 3}) == []
    assert told(source={"prose": prose}, heuristics={"code_max_generated": 3}) == ["heuristics.code_max_generated"]
    own = {"paths": ("b",), "heuristics": {"code_max_generated": 3}}
    assert told(source={"code": code, "prose.a": own}) == ["source.prose.a.heuristics.code_max_generated"]
    assert told(source={"prose.a": own}) == ["source.prose.a.heuristics.code_max_generated"]
    both = code | {"heuristics": {"presets": ["code"], "code_max_generated": 2}}
    assert told(source={"code": both}, heuristics={"code_max_generated": 3}) == []
    assert told(sources=("x",), source={"code": both}, heuristics={"code_max_generated": 3}) == ["heuristics.code_max_generated"]


def test_a_setting_of_a_recipe_of_the_program_is_not_reported_and_that_of_a_person_is(tmp_path: Path) -> None:
    parser, own = help_parser(PrepareConfig, "prepare", ""), tmp_path / "own.toml"
    own.write_text("[prepare.tokenizer]\nvocab_size = 4096\n")
    of_bytes = ["--sources", "builtin", "--tokenizer.kind", "byte"]
    found = [
        settings_without_effect(load_settings(PrepareConfig, [*of_bytes, *words], parser, {}))
        for words in (["--recipe", "smoke"], ["--recipe", str(own)], ["--recipe", "smoke", "--tokenizer.vocab_size", "2048"])
    ]
    assert [[text.split()[0] for text in texts] for texts in found] == [[], ["tokenizer.vocab_size"], ["tokenizer.vocab_size"]]
