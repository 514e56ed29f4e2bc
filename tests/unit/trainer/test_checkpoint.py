from pathlib import Path

import pytest
import torch

from data_pipeline import files
from data_pipeline.errors import CheckpointError
from trainer.checkpoint import Checkpoint, CheckpointStore

FILES = ("manifest.json", "model.safetensors", "optimizer.safetensors", "state.json")


def checkpoint(step: int) -> Checkpoint:
    weights = {"b.weight": torch.full((3, 2), float(step)), "a.weight": torch.arange(4.0)}
    return Checkpoint(step, weights, {"a.weight/exp_avg": torch.ones(4)}, {"progress": {"step": step, "seconds": 0.1}})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.save(checkpoint(step))
    return store


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    loaded = store.load(20)
    assert loaded.state == checkpoint(20).state
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in checkpoint(20).model.items())
    assert torch.equal(loaded.optimizer["a.weight/exp_avg"], torch.ones(4))


def test_the_newest_is_the_highest_step_not_the_last_written(store: CheckpointStore) -> None:
    store.save(checkpoint(5))
    assert store.steps() == [5, 10, 20, 30]
    assert store.newest_verified() == 30


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest_verified() is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "zero tail"])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(store: CheckpointStore, name: str, damage: str) -> None:
    path = store.path(30) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    elif damage == "truncate":
        del content[len(content) // 2 :]
    else:
        content[-8:] = bytes(8)
    path.unlink()
    if damage != "remove":
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        store.verify(30)
    assert store.newest_verified() == 20
    assert (store.directory / ".bad-step-00000030").is_dir()


def test_the_same_step_can_be_damaged_twice(store: CheckpointStore) -> None:
    for _ in range(2):
        (store.path(30) / "state.json").unlink()
        assert store.newest_verified() == 20
        store.save(checkpoint(30))
    assert len(list(store.directory.glob(".bad-step-00000030*"))) == 2


def test_when_all_are_damaged_nothing_starts_anew(store: CheckpointStore) -> None:
    for step in store.steps():
        (store.path(step) / "state.json").write_text("{}")
    for _ in range(2):  # also at the next start, when the damaged ones have been set aside
        with pytest.raises(CheckpointError, match="no intact checkpoint"):
            store.newest_verified()


def test_a_checkpoint_of_another_step_is_refused(store: CheckpointStore) -> None:
    store.path(30).rename(store.path(40))
    with pytest.raises(CheckpointError, match="step 30"):
        store.verify(40)


def test_a_failed_save_leaves_nothing_behind_and_the_others_intact(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync_file", full)
    with pytest.raises(OSError, match="No space"):
        store.save(checkpoint(40))
    assert sorted(path.name for path in store.directory.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]
    assert store.newest_verified() == 30


def test_an_unfinished_save_is_not_a_checkpoint_and_is_cleared_away(store: CheckpointStore) -> None:
    (store.directory / ".step-00000040.tmp").mkdir()
    (store.directory / ".step-00000040.tmp" / "model.safetensors").write_bytes(b"half")
    assert store.newest_verified() == 30
    store.save(checkpoint(40))
    assert store.newest_verified() == 40


def test_retention_keeps_what_it_is_told_and_always_the_newest(store: CheckpointStore) -> None:
    store.retain([10])
    assert store.steps() == [10, 30]
    store.retain([])
    assert store.steps() == [30]


def test_a_missing_step_is_answered_with_those_that_are_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="there are: 10, 20, 30"):
        store.load(15)
