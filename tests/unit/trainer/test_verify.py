import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.errors import ConfigError
from data_pipeline.manifest import Manifest, ShardEntry
from data_pipeline.settings import help_parser, load_settings, to_toml
from trainer.verify import difference_of_manifests, prepare_again, recipe_of

EMPTY = Manifest("", 8, 260, "uint16", "byte", "", ("a",), (), {}, (), (), {}, {})


def manifest(config: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    return replace(EMPTY, config=PrepareConfig(sources=("x",)).portable | (config or {}), **changes)


def test_the_recipe_of_a_manifest_gives_its_settings_again(tmp_path: Path) -> None:
    config = PrepareConfig(
        sources=("x",),
        row_length=64,
        dedup={"near": False},
        quality={"max_perplexity": None},
        source={"web": {"paths": ("y",), "clean": {"min_chars": 3, "max_chars": "none"}}},
    )
    recipe = recipe_of(manifest(config.portable), ["web=y", "web=z"])
    (tmp_path / "recipe.toml").write_text(to_toml("prepare", recipe))
    arguments = ["--recipe", str(tmp_path / "recipe.toml"), "--sources", "x"]
    again = load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""))
    assert again.portable == config.portable
    assert again.source["web"].paths == ("y", "z")


def test_a_path_for_a_source_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sources web=y: the data has the sources a, and no web"):
        recipe_of(manifest(), ["web=y"])


@pytest.mark.parametrize(
    ("config", "sources", "reason"),
    [
        (None, (), "where the sources a lie is not known; give --sources PATH"),
        ({"source": {"web": {}}}, ("x",), "where the source web lie is not known; give --sources NAME=PATH"),
        ({"tokenizer": {"path": "sha256:00"}}, ("x",), r"tokenizer\.path named files"),
    ],
)
def test_data_that_cannot_be_prepared_again_is_said_to_be(
    tmp_path: Path, config: dict[str, Any] | None, sources: tuple[str, ...], reason: str
) -> None:
    outcome = prepare_again(tmp_path, manifest(config), sources)
    assert outcome.facts["prepared_again"] is False
    assert re.search(reason, outcome.text)


def test_the_first_thing_that_differs_between_manifests_is_named() -> None:
    file = {"source": "a", "path": "one.txt", "bytes": 3, "sha256": "sha256:00"}
    shard = ShardEntry("train/a-00000.arrow", "train", "a", 1, 2, 3, 4, "sha256:00")
    ours = manifest(inputs=(file,), shards=(shard,))
    assert "inputs that differs: a/one.txt has another content" in difference_of_manifests(
        ours, replace(ours, inputs=(file | {"sha256": "sha256:01"},))
    )
    assert "inputs that differs: a/two.txt is new" in difference_of_manifests(
        ours, replace(ours, inputs=(file, file | {"path": "two.txt"}))
    )
    assert "inputs that differs: a/one.txt is gone" in difference_of_manifests(ours, replace(ours, inputs=()))
    changed = replace(shard, sha256="sha256:01")
    assert "shards that differs: train/a-00000.arrow" in difference_of_manifests(ours, replace(ours, shards=(changed,)))
    assert difference_of_manifests(ours, ours) == "settings, program or versions differ"
