from typing import Any

import pytest
from pydantic import ValidationError

from data_pipeline.config import PrepareConfig
from data_pipeline.settings import RECIPES, help_parser, load_settings


def load(*arguments: str) -> PrepareConfig:
    return load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""), {})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "sources is not set; give --sources PATH, or the word builtin"),
        (
            {"sources": ["a"], "split": {"by": "tail"}},
            r"text\.documents = file; set text\.documents to chunks, or split\.by to content",
        ),
        ({"sources": ["a"], "clean": {"min_chars": 9, "max_chars": 5}}, "max_chars = 5 is below min_chars = 9"),
        ({"sources": ["a"], "row_length": 4}, "greater than or equal to 8"),
        ({"sources": ["a"], "split": {"val_fraction": 1}}, "less than 1"),
        ({"sources": ["a"], "tokenizer": {"kind": "words"}}, "'bpe', 'unigram', 'char' or 'byte'"),
        ({"sources": ["a"], "rows": 4}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PrepareConfig(**settings)


def test_sources_may_be_missing_where_the_built_in_corpus_stands_in() -> None:
    assert PrepareConfig(if_empty="builtin").sources == ()


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_can_be_read(path: Any) -> None:
    assert load("--recipe", path.stem, "--sources", "somewhere").sources == ("somewhere",)


@pytest.mark.parametrize("recipe", ["demo", "smoke"])
def test_recipes_for_a_first_look_need_no_text(recipe: str) -> None:
    assert load("--recipe", recipe).sources == ("builtin",)


def test_what_names_the_machine_is_not_part_of_the_portable_settings() -> None:
    here = load("--sources", "/home/me/books", "--output", "/data/1", "--workers", "3", "--keep_rejects", "true")
    there = load("--sources", "books", "--output", "out")
    assert here.portable == there.portable
    assert "/" not in str(here.portable)
    assert load("--sources", "books", "--split.seed", "1").portable != there.portable
