import errno
import hashlib
import itertools
import json
import logging
import os
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as library_load
from safetensors.torch import save as library_save
from torch import Tensor

from common.errors import CheckpointError, StorageError
from common.files import sealed, unsealed
from tests.support.storage import FailAt, Intercepted
from trainer.checkpoint.async_saver import AsyncSaver
from trainer.checkpoint.filesystem import Storage
from trainer.checkpoint.store import Checkpoint, CheckpointStore, steps_to_keep
from trainer.checkpoint.tensor_file import decode_tensors, encode_header, raw_bytes, same_bytes, spec_of
from trainer.planning.checkpoints import check_space, required_bytes
from trainer.runs.manifest import FORMAT

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32, torch.uint8, torch.bool]


def checkpoint(step: int) -> Checkpoint:
    weights = {"b.weight": torch.full((3, 2), float(step)), "a.weight": torch.arange(4.0)}
    return Checkpoint(step, weights, {"a.weight/exp_avg": torch.ones(4)}, {"progress": {"step": step, "seconds": 0.1}})


def objects(store: CheckpointStore) -> set[str]:
    return {path.name for path in (store.directory / "objects").iterdir()}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store with three checkpoints. A tensor of at least 16 bytes has a separate file."""
    store = CheckpointStore(tmp_path / "checkpoints", large_bytes=16)
    for step in (10, 20, 30):
        store.save(checkpoint(step))
    return store


# Saving and loading


def test_what_was_saved_is_loaded(store: CheckpointStore) -> None:
    loaded = store.load(20)
    assert (loaded.step, loaded.state) == (20, checkpoint(20).state)
    assert loaded.model.keys() == {"a.weight", "b.weight"}
    assert all(torch.equal(loaded.model[name], tensor) for name, tensor in checkpoint(20).model.items())
    assert torch.equal(loaded.optimizer["a.weight/exp_avg"], torch.ones(4))
    assert loaded.average == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large_bytes", [1, 1 << 20])
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype, large_bytes: int) -> None:
    numbers = torch.arange(24).reshape(4, 6)
    tensors = {
        "matrix": numbers.to(dtype),
        "transposed": numbers.to(dtype).t(),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    if dtype.is_floating_point and dtype != torch.float8_e4m3fn:
        tensors["odd"] = torch.tensor([float("nan"), float("inf"), -0.0]).to(dtype)
    store = CheckpointStore(tmp_path / "checkpoints", large_bytes=large_bytes)
    store.save(Checkpoint(1, tensors, {}, {}, average=tensors))
    loaded = store.load(1)
    assert all(same_bytes(loaded.model[name], tensor) for name, tensor in tensors.items())
    assert all(same_bytes(loaded.average[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_that_the_format_has_no_name_for_is_refused_and_nothing_stays(store: CheckpointStore) -> None:
    before = objects(store)
    with pytest.raises(ValueError, match="complex64 cannot be saved"):
        store.save(Checkpoint(40, {"a": torch.zeros(1, dtype=torch.complex64)}, {}, {}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.save(Checkpoint(40, {"a": torch.full((9,), 7.0)}, {}, {"loss": float("nan")}))
    assert (store.steps(), objects(store)) == ([10, 20, 30], before)


def test_an_unchanged_tensor_is_stored_once(store: CheckpointStore) -> None:
    assert len(objects(store)) == 1 + 1 + 3  # two unchanged tensors, and one for each step
    store.save(Checkpoint(40, {"a.weight": torch.arange(4.0)}, {}, {}))
    assert len(objects(store)) == 5


def test_small_tensors_share_a_file_and_the_unchanged_of_them_stay_where_they_are(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        store.save(checkpoint(step))
    sizes = [(store.directory / "objects" / name).stat().st_size for name in objects(store)]
    assert len(sizes) == 3
    assert sorted(sizes)[1] < max(sizes)  # later files contain only the changed tensor
    store.retain([])
    assert store.load(30).state == checkpoint(30).state


def test_an_object_is_named_by_its_digest_and_other_programs_can_read_it(store: CheckpointStore) -> None:
    seen: dict[str, Tensor] = {}
    for name in objects(store):
        content = (store.directory / "objects" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == name.removesuffix(".safetensors")
        seen |= library_load(content)
    assert torch.equal(seen["model/a.weight"], torch.arange(4.0))


def test_the_manifest_lists_every_tensor(store: CheckpointStore) -> None:
    content = json.loads((store.path(30) / "manifest.json").read_bytes())
    entry = content["tensors"]["model/b.weight"]
    assert (entry["dtype"], entry["shape"], entry["bytes"]) == ("F32", [3, 2], 24)
    assert entry["sha256"] == hashlib.sha256(checkpoint(30).model["b.weight"].numpy().tobytes()).hexdigest()
    assert f"{entry['object']}.safetensors" in objects(store)
    assert content["state"] == checkpoint(30).state


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(Checkpoint(30, {"a": torch.full((9,), 7.0)}, {}, {"again": True}))
    assert store.load(30).state == {"again": True}
    store.retain([10, 20])
    assert store.steps() == [10, 20, 30]


def test_tensors_that_are_only_views_of_others_are_saved_whole(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(Checkpoint(1, {"slice": base[10:20], "column": base.reshape(10, 10)[:, 3]}, {}, {}))
    loaded = store.load(1).model
    assert torch.equal(loaded["slice"], base[10:20])
    assert torch.equal(loaded["column"], base.reshape(10, 10)[:, 3])


# Verification


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def damage_zero_tail(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-8:] = bytes(8)
    path.write_bytes(content)


def own_object(store: CheckpointStore, step: int) -> Path:
    """Return the file of the tensor that differs from step to step."""
    content = json.loads((store.path(step) / "manifest.json").read_bytes())
    return store.directory / "objects" / f"{content['tensors']['model/b.weight']['object']}.safetensors"


@pytest.mark.parametrize("which", ["manifest", "object"])
@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_zero_tail, Path.unlink])
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(
    store: CheckpointStore, which: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path(30) / "manifest.json" if which == "manifest" else own_object(store, 30)
    damage(path)
    for read in (store.verify, store.load):
        with pytest.raises(CheckpointError, match=path.name):
            read(30)
    assert store.newest_verified() == 20
    assert (store.directory / ".bad-step-00000030").is_dir()
    assert path.name in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    assert store.newest_verified() == 20


def test_the_same_step_can_be_damaged_twice(store: CheckpointStore) -> None:
    for _ in range(2):
        (store.path(30) / "manifest.json").unlink()
        assert store.newest_verified() == 20
        store.save(checkpoint(30))
    assert {path.name for path in store.directory.glob(".bad-*")} == {".bad-step-00000030", ".bad-step-00000030-1"}


def test_when_all_are_damaged_nothing_starts_anew(store: CheckpointStore) -> None:
    for step in store.steps():
        (store.path(step) / "manifest.json").write_text("{}")
    for _ in range(2):  # also at the next start, when the damaged ones have been set aside
        with pytest.raises(CheckpointError, match="no intact checkpoint"):
            store.newest_verified()
    assert len(objects(store)) == 5


def test_a_checkpoint_of_another_version_is_refused_by_name_and_stays_as_it_is(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path(30) / "manifest.json"
    path.write_bytes(sealed(unsealed(path.read_bytes()) | {"format": 1, "new": True}))
    for read in (store.newest_verified, lambda: store.load(30)):
        with pytest.raises(CheckpointError, match=f"{path}: it has format 1 of checkpoints, .* reads {FORMAT}; use the version"):
            read()
    before = objects(store)
    store.save(checkpoint(40))
    store.retain([30])
    assert store.steps() == [30, 40]
    assert before < objects(store), "the objects that it needs are unknown, so none is deleted"
    assert "no object file is deleted" in caplog.text


def test_a_checkpoint_of_another_step_is_refused(store: CheckpointStore) -> None:
    store.path(30).rename(store.path(40))
    with pytest.raises(CheckpointError, match="step 30"):
        store.verify(40)


def test_a_missing_step_is_answered_with_those_that_are_there(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="there are: 10, 20, 30"):
        store.load(15)


def test_the_newest_is_the_highest_step_not_the_last_written(store: CheckpointStore) -> None:
    store.save(checkpoint(5))
    assert store.steps() == [5, 10, 20, 30]
    assert store.newest_verified() == 30


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none").newest_verified() is None


def test_a_permission_that_is_missing_is_not_taken_for_damage(store: CheckpointStore) -> None:
    """As damage it would set aside one checkpoint after the other."""
    hook = FailAt(0, errno.EACCES, frozenset({"open"}), persistent=True)
    with pytest.raises(PermissionError):
        CheckpointStore(store.directory, Intercepted(Storage(), hook)).newest_verified()
    assert store.steps() == [10, 20, 30]


def test_a_shared_file_that_rots_makes_every_checkpoint_with_it_bad_and_the_next_save_writes_it_anew(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    shared = next(
        path
        for path in (store.directory / "objects").iterdir()
        if path != own_object(store, 30) and "a.weight" in str(path.read_bytes())
    )
    damage_flip(shared)
    with pytest.raises(CheckpointError, match=shared.name):
        store.verify(10)
    store.save(checkpoint(40))
    assert shared.name in caplog.text
    store.verify(40)
    store.verify(10)  # the same bytes have the same name, so the new file repairs the other checkpoints


# Failures while saving


def test_a_failed_save_leaves_nothing_behind_and_the_others_intact(store: CheckpointStore) -> None:
    before = objects(store)
    for number in itertools.count():
        hook = FailAt(number, errno.ENOSPC, frozenset({"sync"}), persistent=False)
        failing = CheckpointStore(store.directory, Intercepted(Storage(), hook), large_bytes=16)
        try:
            failing.save(checkpoint(40))
        except OSError:
            assert hook.failed is not None
        else:
            break
        assert {path.name for path in store.directory.iterdir()} == {f"step-000000{step}" for step in (10, 20, 30)} | {"objects"}
        assert objects(store) == before
        assert store.newest_verified() == 30
    assert number == 6  # the run's directory, one file, the objects, the manifest, its directory, the directory of checkpoints
    assert store.newest_verified() == 40


def test_what_a_killed_process_left_is_no_checkpoint_and_is_cleared_away(store: CheckpointStore) -> None:
    before = objects(store)
    for name in (".step-00000040.tmp", ".step-00000009.deleted"):
        (store.directory / name).mkdir()
        (store.directory / name / "manifest.json").write_bytes(b"half")
    (store.directory / "objects" / ".0.tmp").write_bytes(b"half")
    (store.directory / "objects" / f"{'a' * 64}.safetensors").write_bytes(b"never named")
    (store.directory / "objects" / "README").write_bytes(b"somebody's")
    assert store.newest_verified() == 30
    assert objects(store) == before | {"README"}
    assert [path.name for path in store.directory.glob(".*")] == []
    store.save(checkpoint(40))
    assert store.newest_verified() == 40


# Retention


@given(
    steps=st.sets(st.integers(0, 10_000), max_size=30),
    last=st.integers(1, 5),
    every=st.none() | st.integers(1, 500),
    best=st.none() | st.integers(0, 10_000),
)
def test_the_newest_the_regular_and_the_best_are_kept_and_no_other(
    steps: set[int], last: int, every: int | None, best: int | None
) -> None:
    kept = steps_to_keep(steps, last=last, every=every, best=best)
    newest = set(sorted(steps, reverse=True)[:last])
    assert kept == {step for step in steps if step in newest or step == best or (every is not None and step % every == 0)}


def test_retention_keeps_what_it_is_told_and_always_the_newest(store: CheckpointStore) -> None:
    store.retain([10])
    assert store.steps() == [10, 30]
    store.retain([])
    assert store.steps() == [30]
    assert len(objects(store)) == 3
    store.verify(30)


def test_nothing_is_deleted_when_the_newest_does_not_read_back(store: CheckpointStore) -> None:
    damage_flip(own_object(store, 30))
    before = objects(store)
    with pytest.raises(CheckpointError, match="digest"):
        store.retain([])
    assert (store.steps(), objects(store)) == ([10, 20, 30], before)


def test_a_checkpoint_that_was_set_aside_keeps_its_data_until_its_directory_is_deleted(store: CheckpointStore) -> None:
    damage_flip(own_object(store, 30))
    rotten = own_object(store, 30).name
    assert store.newest_verified() == 20
    store.save(checkpoint(40))
    store.retain([])
    assert rotten in objects(store)
    (store.directory / ".bad-step-00000030" / "manifest.json").unlink()
    (store.directory / ".bad-step-00000030").rmdir()
    store.collect_trash()
    assert rotten not in objects(store)


def test_an_older_checkpoint_with_a_damaged_manifest_is_set_aside_and_deletion_goes_on(store: CheckpointStore) -> None:
    (store.path(10) / "manifest.json").write_text("{}")
    store.retain([10, 30])
    assert store.steps() == [30]
    assert (store.directory / ".bad-step-00000010").is_dir()


# Tensor files


@settings(max_examples=60)
@given(
    shapes=st.dictionaries(
        st.text(min_size=1, max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)),
        max_size=6,
    )
)
def test_tensor_files_mean_the_same_to_the_library_of_their_format(shapes: dict[str, tuple[torch.dtype, list[int]]]) -> None:
    tensors = {name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    header, order = encode_header({name: spec_of(tensor) for name, tensor in tensors.items()})
    ours = header + b"".join(raw_bytes(tensors[name]) for name in order)
    for read in (library_load(ours), decode_tensors(bytearray(ours)), decode_tensors(bytearray(library_save(tensors)))):
        assert read.keys() == tensors.keys()
        assert all(same_bytes(read[name], tensor) for name, tensor in tensors.items())


@settings(max_examples=300)
@given(at=st.integers(0), value=st.integers(0, 255), cut=st.none() | st.integers(0, 200))
def test_a_tensor_file_with_any_byte_changed_is_read_or_refused_but_never_crashes(at: int, value: int, cut: int | None) -> None:
    content = bytearray(library_save({"a": torch.arange(6.0), "b": torch.tensor([True])}))[:cut]
    if content:
        content[at % len(content)] = value
    try:
        tensors = decode_tensors(content)
    except ValueError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(content)


def test_a_truth_value_is_zero_or_one() -> None:
    header, _ = encode_header({"a": spec_of(torch.tensor([True, False]))})
    assert decode_tensors(bytearray(header + b"\1\0"))["a"].tolist() == [True, False]
    with pytest.raises(ValueError, match="truth value"):
        decode_tensors(bytearray(header + b"\2\0"))


# Saving in the background


def test_a_save_in_the_background_is_acknowledged_when_it_is_done(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    saver = AsyncSaver(store.save)
    for step in (1, 2, 3):
        saver.submit(checkpoint(step))
    saver.wait()
    assert saver.acknowledged_step == 3
    assert store.steps() == [1, 2, 3]


def test_the_step_that_is_acknowledged_is_an_earlier_one_where_training_went_back(tmp_path: Path) -> None:
    saver = AsyncSaver(CheckpointStore(tmp_path / "checkpoints").save)
    assert saver.acknowledged_step == -1
    for step in (2, 4, 2):
        saver.submit(checkpoint(step))
        saver.wait()
        assert saver.acknowledged_step == step


def test_training_goes_on_while_a_save_runs_and_the_next_save_waits_for_it() -> None:
    go, order = threading.Event(), []

    def save(one: Checkpoint) -> None:
        order.append(f"begin {one.step}")
        assert go.wait(60)
        order.append(f"end {one.step}")

    saver = AsyncSaver(save)
    saver.submit(checkpoint(1))
    assert not saver.failed
    assert saver.acknowledged_step == -1
    threading.Timer(0.05, go.set).start()
    saver.submit(checkpoint(2))
    saver.wait()
    assert order == ["begin 1", "end 1", "begin 2", "end 2"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), OSError(28, "No space left on device")])
def test_a_saving_thread_that_dies_is_reported_once_however_it_died(error: BaseException) -> None:
    saver = AsyncSaver(lambda one: None if one.step == 1 else (_ for _ in ()).throw(error))
    saver.submit(checkpoint(1))
    saver.submit(checkpoint(2))
    while not saver.failed:
        pass
    with pytest.raises(StorageError, match=r"step 2 could not be saved.*the last saved step is 1"):
        saver.raise_if_failed()
    saver.raise_if_failed()
    assert saver.acknowledged_step == 1


def test_a_failed_save_is_told_before_the_next_begins_and_other_errors_are_raised_as_they_are() -> None:
    calls: list[int] = []

    def save(one: Checkpoint) -> None:
        calls.append(one.step)
        if one.step == 1:
            raise CheckpointError("damaged")

    saver = AsyncSaver(save)
    saver.submit(checkpoint(1))
    with pytest.raises(CheckpointError, match="damaged"):
        saver.submit(checkpoint(2))
    assert calls == [1]
    saver.submit(checkpoint(3))
    saver.wait()
    assert saver.acknowledged_step == 3


# Disk space

Free = namedtuple("Free", ["f_bavail", "f_frsize"])


def test_the_estimate_covers_what_a_checkpoint_takes(tmp_path: Path) -> None:
    one = Checkpoint(1, {f"layers.{n}.weight": torch.rand(7) for n in range(400)}, {}, {"state": "x" * 1000})
    CheckpointStore(tmp_path / "checkpoints", large_bytes=1).save(one)
    taken = sum(path.lstat().st_blocks * 512 for path in tmp_path.rglob("*"))
    assert taken <= required_bytes(tensor.nbytes for tensor in one.model.values())


@pytest.mark.parametrize(
    ("held", "free", "fits"),
    [(0, 2_000_000, True), (0, 1_999_999, False), (1_500_000, 1_000_000, True), (1_500_000, 999_999, False)],
)
def test_too_little_room_for_the_checkpoints_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, free: int, fits: bool
) -> None:
    directory = tmp_path / "run" / "checkpoints"
    if held:
        directory.mkdir(parents=True)
        (directory / "object").write_bytes(bytes(held))
    asked: list[Any] = []

    def status(path: Path) -> Free:
        asked.append(path)
        return Free(free, 1)

    monkeypatch.setattr("trainer.planning.checkpoints.os.statvfs", status)
    if fits:
        check_space(directory, 1_000_000)
    else:
        with pytest.raises(StorageError, match=r"are free, but checkpoints need 0\.00\d* GB more \(2 checkpoints of 0\.001 GB,"):
            check_space(directory, 1_000_000)
    assert asked == [directory if held else tmp_path]


@pytest.mark.parametrize(("held", "free", "fits"), [(0, 5_000_000, True), (0, 4_999_999, False), (4_000_000, 1_000_000, True)])
def test_what_checkpoints_share_needs_room_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, free: int, fits: bool
) -> None:
    (tmp_path / "object").write_bytes(bytes(held))
    monkeypatch.setattr("trainer.planning.checkpoints.os.statvfs", lambda _: Free(free, 1))
    if fits:
        check_space(tmp_path, 1_000_000, 3_000_000)
    else:
        with pytest.raises(StorageError, match=r"2 checkpoints of 0\.001 GB and 0\.003 GB that they share"):
            check_space(tmp_path, 1_000_000, 3_000_000)
