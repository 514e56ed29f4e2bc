import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from common.settings.load import load_settings
from common.settings.options import help_parser
from data_pipeline.config import PrepareConfig
from data_pipeline.config.tokens import TokenizerConfig
from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.reports.terminal import next_command, summary_lines
from tests.support.prepared import write_prepared
from trainer.config import TrainConfig

_TOTALS = {
    "documents": {"read": 1300, "kept": 1200, "train": 1000, "val": 200, "rejected": 100, "text_bytes": 6000},
    "rejected": {"read": {"not-json": 20}, "dedup": {"exact-duplicate": 80}},
    "lengths": {"tokens": {"total": 1500}},
    "ignored": {
        "unknown-format": {".pdf": 2700, ".docx": 60},
        "unknown-format-in-archive": {".docx": 8},
        "empty": {".txt": 3},
    },
}


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return replace(read_manifest(write_prepared(tmp_path / "books")), totals=_TOTALS)


def _config(tmp_path: Path, recipe: str | None = None) -> PrepareConfig:
    return PrepareConfig(sources=("builtin",), output=tmp_path / "books", recipe=recipe)


def _parsed(command: str) -> TrainConfig:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("trainer", "train")
    return load_settings(TrainConfig, words, help_parser(TrainConfig, "trainer train", ""), {})


def test_the_summary_has_five_lines_with_the_counts_of_the_report(manifest: Manifest, tmp_path: Path) -> None:
    documents, tokens, rejected, ignored, following = summary_lines(manifest, _config(tmp_path))
    assert documents == "documents  1,300 read: 1,000 for training, 200 for validation"
    assert re.fullmatch(r"tokens     [\d,]+ \(4\.00 bytes each\) in 61 training and 9 validation rows of 32", tokens)
    assert rejected == "rejected   100 documents (80 exact-duplicate, 20 not-json)"
    assert ignored == "ignored    2,771 files (2,700 .pdf, 68 .docx, 3 .txt empty)"
    assert following.startswith("next       trainer train --data ")


def test_nothing_rejected_or_ignored_is_said_in_one_word(manifest: Manifest, tmp_path: Path) -> None:
    nothing = replace(manifest, totals=_TOTALS | {"rejected": {"read": {}}, "ignored": {}})
    assert summary_lines(nothing, _config(tmp_path))[2:4] == ["rejected   none", "ignored    none"]


def test_the_next_command_can_be_run_as_it_is(manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = _parsed(next_command(manifest, _config(tmp_path)))
    assert (config.data, config.run) == (tmp_path / "books", Path("runs/books"))
    assert config.model.context == manifest.row_length
    assert (config.recipe, config.limits.minutes) == ("auto", 10)


def test_the_next_command_names_the_recipe_alone_if_its_settings_fit(manifest: Manifest, tmp_path: Path) -> None:
    words = shlex.split(next_command(manifest, _config(tmp_path, "demo")))
    assert words[-2:] == ["--recipe", "demo"]


def test_the_next_command_raises_a_context_that_is_too_short_for_the_rows(manifest: Manifest, tmp_path: Path) -> None:
    long = replace(manifest, row_length=4096)
    assert _parsed(next_command(long, _config(tmp_path, "demo"))).model.context == 4096


def test_the_next_command_limits_a_training_that_its_recipe_does_not_limit(manifest: Manifest, tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.toml"
    recipe.write_text("[prepare]\nrow_length = 32\n[train.model]\ncontext = 32\nheads = 4\n")
    assert _parsed(next_command(manifest, _config(tmp_path, str(recipe)))).limits.steps == 1000


def test_the_next_command_names_a_run_that_does_not_exist_yet(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/books").mkdir(parents=True)
    assert "--run runs/books-2 " in next_command(manifest, _config(tmp_path))


def _folder_of_a_run(tmp_path: Path) -> Path:
    run = tmp_path / "runs/base"
    (run / "tokenizer").mkdir(parents=True)
    (run / "record.json").write_text("{}")
    return run


@pytest.mark.parametrize("below", [".", "tokenizer"])
def test_data_with_the_tokenizer_of_a_run_begins_with_its_weights(manifest: Manifest, tmp_path: Path, below: str) -> None:
    run = _folder_of_a_run(tmp_path)
    config = _config(tmp_path).model_copy(update={"tokenizer": TokenizerConfig(path=run / below)})
    words = shlex.split(next_command(manifest, config))
    assert words[words.index("--init") + 1] == str(run)
    assert "--objective" not in words
    assert words[-2:] == ["--model.context", str(manifest.row_length)]
    (run / "config.toml").write_text("[train.model]\ncontext = 'many'\n")
    assert "--model.context" in next_command(manifest, config)
    (run / "config.toml").write_text("[train.model]\ncontext = 64\n")
    assert "--model.context" not in next_command(manifest, config)


def test_the_next_command_of_another_tokenizer_begins_with_no_weights(manifest: Manifest, tmp_path: Path) -> None:
    config = _config(tmp_path).model_copy(update={"tokenizer": TokenizerConfig(path=tmp_path / "tokenizer")})
    assert "--init" not in next_command(manifest, config)


def test_preference_pairs_are_trained_with_their_objective(manifest: Manifest, tmp_path: Path) -> None:
    pairs = replace(manifest, config={"records": {"chosen_field": "better"}})
    assert " --objective preference --init RUN" in next_command(pairs, _config(tmp_path))
    run = _folder_of_a_run(tmp_path)
    config = _config(tmp_path).model_copy(update={"tokenizer": TokenizerConfig(path=run)})
    assert f" --objective preference --init {run}" in next_command(pairs, config)


def test_labelled_documents_are_classified_unless_the_recipe_has_an_objective(manifest: Manifest, tmp_path: Path) -> None:
    labelled = replace(manifest, totals=_TOTALS | {"labels": {"names": ["a", "b"]}})
    assert _parsed(next_command(labelled, _config(tmp_path))).objective == "classification"
    assert "--objective" not in next_command(labelled, _config(tmp_path, "classify"))
