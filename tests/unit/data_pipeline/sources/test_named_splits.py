from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import SourceError
from data_pipeline.config import PrepareConfig
from data_pipeline.sources.formats import IgnoredFiles
from data_pipeline.sources.inputs import find_inputs
from data_pipeline.sources.named_splits import named_splits, stale_files


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("data/train-00000-of-00002.parquet", "train"),
        ("data/test-00000-of-00001.parquet", "test"),
        ("TEST.csv", "test"),
        ("squad_dev.jsonl.gz", "validation"),
        ("wiki.valid.jsonl", "validation"),
        ("val/part-1.jsonl", "validation"),
        ("test1.jsonl", "test"),
        ("train2.jsonl", "train"),
        ("test-000.tar", "test"),
        ("test/a/b.arrow", "test"),
        ("contest.jsonl", None),
        ("latest/data.jsonl", None),
        ("data.jsonl", None),
    ],
)
def test_a_word_between_separators_is_the_split_of_records(path: str, split: str | None) -> None:
    assert named_splits({path: True, "other.jsonl": True}, None).get(path) == split


def test_text_has_splits_only_under_their_whole_names_and_beside_a_training_split() -> None:
    paths = {"train.txt": "train", "test.txt": "test", "test_of_time.txt": None, "dev/a.txt": "validation", "ptb.test.txt": "test"}
    expected = {path: split for path, split in paths.items() if split}
    assert named_splits(dict.fromkeys(paths, False), None) == expected
    assert named_splits({"test.txt": False, "a.txt": False}, None) == {}


def test_a_source_of_one_split_has_none() -> None:
    assert named_splits({"test.jsonl": True}, None) == {}
    assert named_splits({"a/test-1.jsonl": True, "a/test-2.jsonl": True}, None) == {}
    assert named_splits({"test.jsonl": True, "validation.jsonl": True}, None) == {"test.jsonl": "test"}


def test_a_card_gives_splits_to_files_with_other_names(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a/*\n"
        "  - split: test\n    path: [b/*.jsonl]\n---\n# Data\n"
    )
    assert named_splits({"a/1.jsonl": True, "b/2.jsonl": True}, tmp_path) == {"a/1.jsonl": "train", "b/2.jsonl": "test"}


CARDS = [
    "configs:\n- data_files:\n  - split: train\n    path: ./a/*\n  - split: test\n    path: ./b/*\n",
    "configs:\n- data_dir: b\n  data_files:\n  - split: test\n    path: '*.jsonl'\n",
    "configs:\n- data_files:\n    train: a/1.jsonl\n    test: b/2.jsonl\n",
]


@pytest.mark.parametrize("front", CARDS)
def test_cards_name_files_in_several_ways(tmp_path: Path, front: str) -> None:
    (tmp_path / "README.md").write_text(f"\ufeff---\n{front}---\n")
    assert named_splits({"a/1.jsonl": True, "b/2.jsonl": True}, tmp_path)["b/2.jsonl"] == "test"


WRONG = ["a: !!bool x", "a: !!int ''", "a: !!timestamp x", "configs: 7", "configs:\n- data_files: x", "configs:\n- 3"]


@pytest.mark.parametrize("card", ["", *(f"---\n{front}\n---\n" for front in WRONG), "---\n: [\n---\n"])
def test_a_card_that_says_nothing_is_no_error(tmp_path: Path, card: str) -> None:
    (tmp_path / "README.md").write_text(card)
    assert named_splits({"train.jsonl": True, "test.jsonl": True}, tmp_path) == {"train.jsonl": "train", "test.jsonl": "test"}


def test_files_of_an_earlier_save_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    paths = ["train/data-00000-of-00001.arrow", "train/data-00001-of-00002.arrow", "other/a.arrow"]
    assert stale_files(paths, tmp_path) == {"train/data-00001-of-00002.arrow"}
    with pytest.raises(SourceError, match=r"names data-00000-of-00001\.arrow, which is missing"):
        stale_files(paths[1:], tmp_path)


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": name}) + "\n")


def test_a_test_split_is_no_input_unless_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "data"
    write(source, "train.jsonl", "validation.jsonl", "test.jsonl")
    config = PrepareConfig(sources=(str(source),))
    ignored = IgnoredFiles()
    found = {file.path: file.split for file in find_inputs(config, tmp_path / "known", ignored)}
    assert found == {"train.jsonl": "train", "validation.jsonl": "validation"}
    assert ignored.report({}) == {"test-split": {".jsonl": 1}}
    assert "test split" in caplog.text
    assert "test.jsonl" in caplog.text
    asked = PrepareConfig(sources=(str(source),), split={"by_name": False})
    assert {file.split for file in find_inputs(asked, tmp_path / "known")} == {None}
    alone = PrepareConfig(sources=(str(source / "test.jsonl"),))
    assert [file.path for file in find_inputs(alone, tmp_path / "known")] == ["test.jsonl"]
