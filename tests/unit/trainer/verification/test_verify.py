import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError, PreparedDataError
from common.settings.dotted import to_toml
from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig, portable_settings
from data_pipeline.dataset.manifest import Manifest, ShardEntry
from trainer.verification.verify import difference_of_manifests, prepare_again, recipe_of

EMPTY = Manifest("", 8, 260, "uint16", "byte", "", ("a",), (), {}, (), (), {}, {})


def manifest(config: dict[str, Any] | None = None, **changes: Any) -> Manifest:
    return replace(EMPTY, config=portable_settings(PrepareConfig(sources=("x",))) | (config or {}), **changes)


def test_the_recipe_of_a_manifest_gives_its_settings_again(tmp_path: Path) -> None:
    config = PrepareConfig(
        sources=("x",),
        row_length=64,
        dedup={"near": False},
        quality={"max_perplexity": None},
        source={"web": {"paths": ("y",), "clean": {"min_chars": 3, "max_chars": "none"}}},
    )
    recipe = recipe_of(manifest(portable_settings(config)), ["web=y", "web=z"])
    (tmp_path / "recipe.toml").write_text(to_toml("prepare", recipe))
    arguments = ["--recipe", str(tmp_path / "recipe.toml"), "--sources", "x"]
    again = load_settings(PrepareConfig, arguments, help_parser(PrepareConfig, "prepare", ""))
    assert portable_settings(again) == portable_settings(config)
    assert again.source["web"].paths == ("y", "z")


def test_a_path_for_a_source_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--sources web=y: the data has the sources a, and no web"):
        recipe_of(manifest(), ["web=y"])


def test_a_manifest_decides_nothing_but_the_bytes(tmp_path: Path) -> None:
    """One of a stranger, which names a cluster, a server, a folder and files of this machine."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "\n\n".join(f"a paragraph with a number in it, {number} this time" for number in range(99))
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        hostile = {
            "engine": "ray",
            "ray_address": f"ray://{address}",
            "workers": 4000,
            "output": str(tmp_path / "elsewhere"),
            "sources": [f"http://{address}/text.txt"],
            "recipe": str(tmp_path / "recipe.toml"),
            "if_empty": "builtin",
            "keep_rejects": True,
            "source": {"web": {"paths": [f"http://{address}/more.txt"], "language": {"fasttext_model": "/etc/passwd"}}},
            "text": {"documents": "paragraphs"},
            "tokenizer": {"kind": "byte"},
        }
        folder = f"web={tmp_path / 'text'}"
        assert recipe_of(replace(EMPTY, config=hostile), [folder]) == {
            "source": {"web": {"paths": [str(tmp_path / "text")], "language": {}}},
            "text": {"documents": "paragraphs"},
            "tokenizer": {"kind": "byte"},
        }
        with pytest.raises(PreparedDataError, match="prepared again, its root digest is"):
            prepare_again(tmp_path / "data", replace(EMPTY, config=hostile), [folder])
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


@pytest.mark.parametrize(
    "name", ["dedup.benchmarks", "tokenizer.path", "quality.good", "augment.synonyms", "language.fasttext_model"]
)
def test_a_file_that_a_manifest_names_is_not_read(tmp_path: Path, name: str) -> None:
    section, _, leaf = name.partition(".")
    outcome = prepare_again(tmp_path, replace(EMPTY, config={section: {leaf: "/etc/passwd"}}), ("x",))
    assert outcome.facts["prepared_again"] is False
    assert name in outcome.text


@pytest.mark.parametrize(
    ("config", "sources", "reason"),
    [
        (None, (), "the location of sources a is not known; give --sources PATH"),
        ({"source": {"web": {}}}, ("x",), "the location of source web is not known; give --sources NAME=PATH"),
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
    assert "inputs that differs: a/one.txt has different content" in difference_of_manifests(
        ours, replace(ours, inputs=(file | {"sha256": "sha256:01"},))
    )
    assert "inputs that differs: a/two.txt is new" in difference_of_manifests(
        ours, replace(ours, inputs=(file, file | {"path": "two.txt"}))
    )
    assert "inputs that differs: a/one.txt is missing" in difference_of_manifests(ours, replace(ours, inputs=()))
    changed = replace(shard, sha256="sha256:01")
    assert "shards that differs: train/a-00000.arrow" in difference_of_manifests(ours, replace(ours, shards=(changed,)))
    assert difference_of_manifests(ours, ours) == "settings, program or versions differ"
