"""The fingerprint depends on the content of the files that settings name, not on their paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from data_pipeline.config import PrepareConfig, TokenizerConfig
from data_pipeline.publishing.fingerprint import _files_of_tokenizer, fingerprint_of, settings_of
from data_pipeline.tokenizer import save_tokenizer
from data_pipeline.tokenizer.training import train_tokenizer


def fingerprint(**settings: Any) -> str:
    return fingerprint_of(settings_of(PrepareConfig(sources=("builtin",), **settings)), [])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Write the files of a tokenizer into a folder. They are not opened here."""
    folder = tmp_path / "tok"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "README.md"):
        (folder / name).write_text(f"{name} as it was")
    return folder


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("named", ["tokenizer.json", "."])
def test_every_file_that_a_supplied_tokenizer_is_read_from_counts(tokenizer: Path, named: str, name: str) -> None:
    before = fingerprint(tokenizer={"path": tokenizer / named})
    (tokenizer / name).write_text("changed")
    changed = fingerprint(tokenizer={"path": tokenizer / named})
    (tokenizer / name).unlink()
    if name != "tokenizer.json":
        assert len({before, changed, fingerprint(tokenizer={"path": tokenizer / named})}) == 3
    else:
        assert before != changed


def test_other_files_and_the_place_of_a_tokenizer_do_not_count(tokenizer: Path, tmp_path: Path) -> None:
    before = fingerprint(tokenizer={"path": tokenizer / "tokenizer.json"})
    (tokenizer / "README.md").write_text("changed")
    moved = tokenizer.rename(tmp_path / "moved")
    assert fingerprint(tokenizer={"path": moved}) == fingerprint(tokenizer={"path": moved / "tokenizer.json"}) == before


@pytest.mark.parametrize(
    ("section", "setting", "names"),
    [
        ("dedup", "benchmarks", ("a.txt", "a.jsonl")),
        ("augment", "synonyms", ("a.tsv", "a.json")),
        ("quality", "good", ("a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz")),
        ("tokenizer", "path", ("a.json", "a.model")),
    ],
)
def test_equal_bytes_of_another_format_count_as_other_settings(
    tmp_path: Path, section: str, setting: str, names: tuple[str, ...]
) -> None:
    def of(name: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"the same")
        values: dict[str, Any] = {setting: path if setting in ("synonyms", "path") else (path,)}
        return fingerprint(**{section: values | ({"bad": (path,)} if section == "quality" else {})})

    assert len({of(name) for name in names}) == len(names)
    assert of(f"elsewhere/b{''.join(Path(names[0]).suffixes)}") == of(names[0])


def test_the_names_in_a_folder_of_examples_count_even_strange_ones(tmp_path: Path) -> None:
    folder = tmp_path / "good"
    folder.mkdir()
    (folder / "a\udcff.txt").write_bytes(b"the same")
    before = fingerprint(quality={"good": (folder,), "bad": (folder,)})
    (folder / "a\udcff.txt").rename(folder / "a.jsonl")
    assert fingerprint(quality={"good": (folder,), "bad": (folder,)}) != before


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.path"):
        settings_of(PrepareConfig(sources=("builtin",), tokenizer={"path": tmp_path / "none.json"}))


def test_the_files_of_a_linked_folder_count(tmp_path: Path) -> None:
    good, bad, elsewhere = (tmp_path / name for name in ("good", "bad", "elsewhere"))
    for folder in (good, bad, elsewhere):
        folder.mkdir()
        (folder / "a.txt").write_text("text")
    (good / "linked").symlink_to(elsewhere)
    before = fingerprint(quality={"good": [good], "bad": [bad]})
    (elsewhere / "a.txt").write_text("other text")
    assert fingerprint(quality={"good": [good], "bad": [bad]}) != before


def test_the_tokenizer_of_a_run_counts_as_another_one_than_its_file_alone(tmp_path: Path) -> None:
    """The same SentencePiece file is of kind `bpe` in the one place, and of kind `sentencepiece` in the other."""
    sample = ["the cat sat on the mat and the dog ran to the sea"] * 50
    settings = TokenizerConfig(kind="bpe", vocab_size=290)
    save_tokenizer(train_tokenizer(sample, settings), tmp_path / "tokenizer")
    model = tmp_path / "tokenizer" / "bpe.model"
    assert _files_of_tokenizer(model) == _files_of_tokenizer(model.parent) == [(".model", model)]
    (tmp_path / "record.json").write_text("{}")
    assert _files_of_tokenizer(tmp_path) == [("bpe.model", model)]
