"""A training says in which settings its data differs from what its recipe prepares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.dataset.manifest import Manifest, read_manifest
from tests.support.prepared import write_prepared
from trainer.planning.lines import other_preparation


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    config: dict[str, Any] = {"row_length": 32, "tokenizer": {"kind": "bpe", "vocab_size": 300}, "dedup": {"near": True}}
    return replace(read_manifest(write_prepared(tmp_path / "data")), config=config)


def recipe(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def test_the_settings_that_differ_are_named_with_both_values(manifest: Manifest, tmp_path: Path) -> None:
    text = '[prepare]\nsources = ["builtin"]\nrow_length = 64\n[prepare.tokenizer]\nkind = "bpe"\nvocab_size = 500\n'
    name = recipe(tmp_path, text)
    expected = "it has row_length = 32 instead of 64, tokenizer.vocab_size = 300 instead of 500"
    assert other_preparation(name, manifest) == f"the data was not prepared with the recipe {name}: {expected}"


@pytest.mark.parametrize(
    "text",
    ["", "[train]\nseed = 1\n", '[prepare]\nrow_length = 32\n[prepare.tokenizer]\nkind = "bpe"\n', "prepare = 3", "broken ["],
)
def test_a_recipe_that_agrees_or_says_nothing_about_the_data_is_no_news(manifest: Manifest, tmp_path: Path, text: str) -> None:
    assert other_preparation(recipe(tmp_path, text), manifest) is None


@pytest.mark.parametrize("name", [None, "auto", "gone.toml"])
def test_without_a_recipe_to_compare_with_nothing_is_said(manifest: Manifest, name: str | None) -> None:
    assert other_preparation(name, manifest) is None


def test_many_differences_are_counted(manifest: Manifest, tmp_path: Path) -> None:
    text = '[prepare]\nrow_length = 1\n[prepare.tokenizer]\nkind = "byte"\nvocab_size = 1\n[prepare.dedup]\nnear = false\n'
    assert str(other_preparation(recipe(tmp_path, text), manifest)).endswith(" and 1 more")
