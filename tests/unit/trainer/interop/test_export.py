"""An exported directory is complete or absent, and other files are never touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from common import targets
from common.errors import CheckpointError, ConfigError, StorageError
from common.files import canonical_json, digest_bytes, sealed, unsealed
from tests.support.exported import export_source
from trainer.interop import export
from trainer.interop.export import (
    check_output,
    foreign_entries,
    read_export_record,
    verify_export,
    write_export,
)
from trainer.model.saved_decoder import SavedDecoder


@pytest.fixture
def source(tmp_path: Path) -> SavedDecoder:
    return export_source(tmp_path / "run")


@pytest.fixture
def exported(source: SavedDecoder, tmp_path: Path) -> Path:
    write_export(source, tmp_path / "out", kind="hf", dtype="fp32")
    return tmp_path / "out"


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_record_is_canonical_and_names_every_file_with_its_digest(source: SavedDecoder, exported: Path) -> None:
    files = content(exported)
    raw = files.pop("export.json")
    record = json.loads(raw)
    assert raw == canonical_json(record)
    assert record["files"] == {name: {"sha256": digest_bytes(data), "bytes": len(data)} for name, data in files.items()}
    assert (record["step"], record["weights"]) == (60, source.weights_digest)
    assert record["tokenizer"] == {"kind": "byte", "digest": source.tokenizer.digest, "exact": True}
    assert record["data"] == source.record.data.root_digest


def test_an_empty_directory_is_used_and_missing_parents_are_made(source: SavedDecoder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for output in (tmp_path / "empty", tmp_path / "a" / "b"):
        write_export(source, output, kind="hf", dtype="fp32")
        assert read_export_record(output).step == 60
        assert not leftovers(output.parent)


def test_an_earlier_export_is_replaced_on_request_only(source: SavedDecoder, exported: Path) -> None:
    before = content(exported)
    with pytest.raises(ConfigError, match="add --replace"):
        write_export(source, exported, kind="hf", dtype="bf16")
    assert content(exported) == before
    write_export(source, exported, kind="hf", dtype="bf16", replace=True)
    assert read_export_record(exported).dtype == "bf16"
    assert not leftovers(exported.parent)


def add_file(directory: Path) -> None:
    (directory / "notes.txt").write_text("mine")


def add_folder(directory: Path) -> None:
    (directory / "onnx").mkdir()


def make_link(directory: Path) -> None:
    (directory / "config.json").rename(directory.parent / "elsewhere.json")
    (directory / "config.json").symlink_to(directory.parent / "elsewhere.json")


def remove_record(directory: Path) -> None:
    (directory / "export.json").unlink()


@pytest.mark.parametrize("change", [add_file, add_folder, make_link, remove_record])
def test_files_of_others_are_never_replaced(source: SavedDecoder, exported: Path, change: Callable[[Path], None]) -> None:
    change(exported)
    before = sorted(path.name for path in exported.iterdir())
    with pytest.raises(ConfigError, match=r"name (another|a new or empty) directory"):
        write_export(source, exported, kind="hf", dtype="fp32", replace=True)
    assert sorted(path.name for path in exported.iterdir()) == before


def test_a_file_or_a_link_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name, kind in (("file", "file"), ("link", "link")):
        with pytest.raises(ConfigError, match=f"is a {kind}"):
            check_output(tmp_path / name, replace=True)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_error_leaves_what_was_there(
    source: SavedDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    output = tmp_path / "out"
    if replaced:
        write_export(source, output, kind="hf", dtype="fp32")
    before = content(output) if replaced else None

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def write_half(_source: object, folder: Path, *_: object, **_named: object) -> None:
        (folder / "config.json").write_text("{")
        fail()

    for patched in ((export, "write_files", write_half), (targets, "commit_directory", fail)):
        with monkeypatch.context() as patch:
            patch.setattr(*patched)
            with pytest.raises(StorageError, match="no space"):
                write_export(source, output, kind="hf", dtype="bf16", replace=True)
        assert output.exists() == replaced
        assert not replaced or content(output) == before
        assert not leftovers(tmp_path)


def test_a_directory_alone_is_checked_by_its_record(exported: Path) -> None:
    facts = verify_export(exported)
    assert (facts["step"], facts["files"], facts["compared_with_run"], facts["foreign"]) == (60, 7, False, [])
    (exported / "notes.txt").write_text("mine")
    assert verify_export(exported)["foreign"] == ["notes.txt"]


def test_a_flipped_bit_in_any_file_is_named(exported: Path) -> None:
    for path in sorted(exported.iterdir()):
        data = path.read_bytes()
        for place in (0, len(data) // 2, len(data) - 1):
            changed = bytearray(data)
            changed[place] ^= 1
            path.write_bytes(changed)
            with pytest.raises(CheckpointError, match=path.name):
                verify_export(exported)
        path.write_bytes(data)
    verify_export(exported)


def test_a_missing_or_longer_file_is_named(exported: Path) -> None:
    data = (exported / "config.json").read_bytes()
    (exported / "config.json").write_bytes(data + b"\n")
    with pytest.raises(CheckpointError, match=r"config.json"):
        verify_export(exported)
    (exported / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        verify_export(exported)


def change_record(directory: Path, **changes: object) -> None:
    path = directory / "export.json"
    path.write_bytes(sealed(unsealed(path.read_bytes()) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"step": -1},
        {"dtype": "int4"},
        {"files": {"../../etc/passwd": {"sha256": "sha256:" + "0" * 64, "bytes": 1}}},
        {"files": {"config.json": {"sha256": "sha256:" + "0" * 64, "bytes": -1}}},
        {"weights": 5},
        {"tokenizer": None},
    ],
)
def test_a_record_of_a_stranger_is_checked_before_use(exported: Path, changes: dict[str, object]) -> None:
    change_record(exported, **changes)
    with pytest.raises(CheckpointError, match=r"export.json: the file was changed"):
        verify_export(exported)


def test_weights_that_the_record_does_not_name_are_found_behind_right_digests(exported: Path) -> None:
    path = exported / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    record = read_export_record(exported)
    change_record(
        exported, files=record.model_dump()["files"] | {path.name: {"sha256": digest_bytes(bytes(data)), "bytes": len(data)}}
    )
    with pytest.raises(CheckpointError, match="its weights are not those"):  # the digests of all files are right
        verify_export(exported)


def test_a_directory_without_a_record_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no export.json"):
        verify_export(tmp_path)
    with pytest.raises(CheckpointError, match=r"no export.json"):
        read_export_record(tmp_path / "nowhere")


def test_a_link_is_foreign_and_not_followed(exported: Path) -> None:
    make_link(exported)
    assert foreign_entries(exported, read_export_record(exported)) == ["config.json"]
    with pytest.raises(CheckpointError, match="symbolic link"):
        verify_export(exported)
