from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import ConfigError
from common.paths import RECIPES
from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig, portable_settings


def load(*arguments: str) -> PrepareConfig:
    return load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "sources is not set; give --sources PATH, or --sources builtin for the built-in corpus"),
        (
            {"sources": ["a"], "split": {"by": "tail"}},
            r"text\.documents = file; set text\.documents to chunks, or split\.by to content",
        ),
        ({"sources": ["a"], "clean": {"min_chars": 9, "max_chars": 5}}, "max_chars = 5 is below min_chars = 9"),
        (
            {
                "source": {"a": {"paths": ["a"]}, "b": {"paths": ["b"], "text": {"documents": "file"}}},
                "split": {"by": "tail"},
                "text": {"documents": "chunks"},
            },
            r"but source\.b\.text\.documents = file; set source\.b\.text\.documents to chunks",
        ),
        ({"sources": ["a"], "balance": {"by": "field", "field": "topic"}}, "balance.field = topic, but no source keeps a field"),
        (
            {"sources": ["a"], "balance": {"by": "kind", "weights": {"proze": 2}}},
            "weights.proze is not a kind of text; the kinds are",
        ),
        ({"sources": ["a"], "row_length": 4}, "greater than or equal to 8"),
        ({"sources": ["a"], "split": {"val_fraction": 1}}, "less than 1"),
        ({"sources": ["a"], "tokenizer": {"kind": "words"}}, "'bpe', 'unigram', 'char' or 'byte'"),
        ({"sources": ["a"], "rows": 4}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PrepareConfig(**settings)


def test_what_only_named_sources_must_have_they_may_set_themselves() -> None:
    own = {"paths": ["a"], "text": {"documents": "chunks"}, "records": {"metadata": ["topic"]}}
    balance = {"by": "field", "field": "topic"}
    assert PrepareConfig(source={"a": own}, split={"by": "tail"}, balance=balance).balance.field == "topic"
    assert PrepareConfig(sources=("b",), source={"a": own}, balance=balance).balance.field == "topic"
    with pytest.raises(ValidationError, match=r"but text\.documents = file"):
        PrepareConfig(sources=("b",), source={"a": own}, split={"by": "tail"})


def test_sources_may_be_missing_where_the_built_in_corpus_stands_in() -> None:
    assert PrepareConfig(if_empty="builtin").sources == ()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--source", "x"), r"did you mean --sources\?"),
        (("--source.web.paths", "x"), r"--source.web.paths: only a recipe can hold it: \[prepare.source\]$"),
        (("--balance.weights", "1"), r"--balance.weights: only a recipe can hold it: \[prepare.balance.weights\]$"),
    ],
)
def test_what_only_a_recipe_can_hold_is_told_from_a_slip_of_the_pen(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*words)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_read(path: Any) -> None:
    assert load("--recipe", path.stem, "--sources", "somewhere").sources == ("somewhere",)


def test_none_in_a_recipe_unsets_a_setting_for_all_sources_or_for_one(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[prepare.quality]\nmax_perplexity = "none"\n[prepare.source.b]\npaths = ["b"]\nkind = "none"\n')
    assert load("--recipe", str(recipe)).quality.max_perplexity is None
    assert load("--recipe", str(recipe)).source["b"].kind is None
    recipe.write_text(
        '[prepare.source.b]\npaths = ["b"]\nquality.max_perplexity = "none"\nclean = { unicode = "none", max_chars = "none" }\n'
        "[prepare.clean]\nmax_chars = 9000\n"
    )
    config = load("--recipe", str(recipe))
    own = config.for_source("b")
    assert (own.quality.max_perplexity, own.clean.unicode, own.clean.max_chars) == (None, "none", None)
    assert (config.quality.max_perplexity, config.clean.max_chars) == (1000, 9000)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("clean.min_char = 3", r"^source.b.clean.min_char is not a setting; did you mean source.b.clean.min_chars\?$"),
        ("clean.min_chars = 0", r"^source.b.clean.min_chars = 0: input should be greater than or equal to 1$"),
        ('clean.min_chars = "none"', r"^source.b.clean.min_chars = 'none': input should be a valid integer"),
        ("clean = { min_chars = 9, max_chars = 5 }", r"^source.b.clean: max_chars = 5 is below min_chars = 9"),
        ("clean = { min_chars = 0, a = 1 }", r"^source.b.clean.min_chars = 0: .*; source.b.clean.a is not a setting"),
        ("heuristics.gopher_max_top_ngrams = [1]", r"^source.b.heuristics.gopher_max_top_ngrams = \[1\]: too few values$"),
        ("cleen.min_chars = 3", r"^source.b.cleen is not a setting; did you mean source.b.clean\?$"),
        ('quality.trusted = "b"', r"^source.b.quality.trusted is shared by all sources; set quality.trusted$"),
    ],
)
def test_a_mistake_in_what_a_source_sets_for_itself_is_answered_as_any_other(tmp_path: Path, own: str, message: str) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[prepare.source.b]\npaths = ["b"]\n{own}\n')
    with pytest.raises(ConfigError, match=message):
        load("--recipe", str(recipe))


def test_the_help_names_no_type_of_python() -> None:
    text = help_parser(PrepareConfig, "prepare", "").format_help()
    assert "--heuristics.gopher_max_top_ngrams float [float ...]" in text
    assert "Annotated" not in text


@pytest.mark.parametrize("recipe", ["demo", "smoke"])
def test_recipes_for_a_first_look_need_no_text(recipe: str) -> None:
    assert load("--recipe", recipe).sources == ("builtin",)


def test_what_names_the_machine_is_not_part_of_the_portable_settings() -> None:
    here = load("--sources", "/home/me/books", "--output", "/data/1", "--workers", "3", "--keep_rejects", "true")
    there = load("--sources", "books", "--output", "out")
    assert portable_settings(here) == portable_settings(there)
    assert "/" not in str(portable_settings(here))
    assert portable_settings(load("--sources", "books", "--split.seed", "1")) != portable_settings(there)
