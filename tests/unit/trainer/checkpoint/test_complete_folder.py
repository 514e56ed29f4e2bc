"""The folder with one complete checkpoint that hooks copy."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import contents, same
from trainer.checkpoint.store import CheckpointStore, link_checkpoint


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (1, 2):
        store.save(contents(step))
    return store


def test_a_copy_of_the_folder_is_the_checkpoint_and_nothing_else(store: CheckpointStore, tmp_path: Path) -> None:
    whole = link_checkpoint(store.path(2), tmp_path / "links")
    assert whole == tmp_path / "links/step-00000002"
    copy = CheckpointStore(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(tmp_path / "links")
    assert copy.steps() == [2]
    assert same(copy.load(2), store.load(2))
    store.verify(1)


def test_the_files_take_no_space(store: CheckpointStore, tmp_path: Path) -> None:
    whole = link_checkpoint(store.path(1), tmp_path / "links")
    assert whole is not None
    files = [file for file in whole.rglob("*") if file.is_file()]
    assert len(files) > 1
    assert all(file.stat().st_nlink > 1 for file in files)


def test_without_hard_links_the_files_are_copied(store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_names: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    whole = link_checkpoint(store.path(1), tmp_path / "links")
    assert whole is not None
    assert same(CheckpointStore(whole).load(1), store.load(1))


def test_what_an_earlier_process_left_there_is_replaced(store: CheckpointStore, tmp_path: Path) -> None:
    link_checkpoint(store.path(1), tmp_path / "links")
    link_checkpoint(store.path(2), tmp_path / "links")
    assert [path.name for path in (tmp_path / "links").iterdir()] == ["step-00000002"]


def test_a_link_in_place_of_the_folder_is_refused_and_its_target_is_untouched(store: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/file").touch()
    (tmp_path / "links").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        link_checkpoint(store.path(1), tmp_path / "links")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["file"]


@pytest.mark.parametrize("lost", ["manifest.json", "objects"])
def test_a_checkpoint_that_was_deleted_in_the_meantime_has_no_folder(store: CheckpointStore, tmp_path: Path, lost: str) -> None:
    if lost == "objects":
        shutil.rmtree(store.directory / "objects")
    else:
        (store.path(1) / lost).unlink()
    assert link_checkpoint(store.path(1), tmp_path / "links") is None
    assert not (tmp_path / "links").exists()
