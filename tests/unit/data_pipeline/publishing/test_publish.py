"""Publishing replaces files that a preparation wrote, and no others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, PreparedDataError
from common.files import digest_bytes
from data_pipeline.dataset.manifest import Manifest, ShardEntry, read_manifest, verify
from data_pipeline.dataset.shards import Rows
from data_pipeline.publishing.ownership import exclusive
from data_pipeline.publishing.publish import publish, reuse_finished


def manifest_of(shards: dict[str, bytes], files: dict[str, bytes]) -> Manifest:
    entries = [
        ShardEntry(path, path.partition("/")[0], "a", rows=1, tokens=1, targets=1, bytes=len(data), sha256=digest_bytes(data))
        for path, data in shards.items()
    ]
    return Manifest(
        fingerprint=digest_bytes(b"".join(shards.values())),
        row_length=8,
        vocab_size=8,
        token_type="uint16",
        tokenizer_kind="byte",
        tokenizer_digest="",
        sources=("a",),
        shards=tuple(entries),
        files={name: digest_bytes(data) for name, data in files.items()},
        inputs=(),
        partitions=(),
        config={},
        totals={},
    )


def give(directory: Path, data: bytes = b"rows", *, tokens: bool = True) -> Manifest:
    """Publish two shards and some files that contain `data`."""
    shards = {"train/a-00000.arrow": data, "val/a-00000.arrow": data}
    files = {"tokenizer/bytes.json": b"{}", "report.json": b"{}"} | ({"tokens/000000.arrow": data} if tokens else {})
    manifest, _ = manifest_of(shards, files).sealed()
    with exclusive(directory) as folder:
        work = folder.start_work(manifest.fingerprint)
        paths = {name: work / "shards" / name for name in shards}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(shards[name])
        return publish(directory, work, manifest, {**paths, **files, "report.html": b"page", "DATA_CARD.md": b"card"})


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "train/a.txt",
            "val/deep/b.txt",
            "tokens/c",
            "chosen/.hidden",
            "rejects/a.txt",
            "tokenizer/tokenizer.json",
            "train/a-00000.arrow",
        ),
        *("report.html", "report.json", "DATA_CARD.md", "timings.json", "rejects.jsonl", "inputs.json"),
        *("manifest.json", "published.json", "train", "report.html/inside.txt"),
    ],
)
def test_a_foreign_file_that_would_be_replaced_is_refused_before_anything_is_done(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text('{"title": "mine"}')
    before = content_of(tmp_path)
    with pytest.raises(ConfigError, match=rf"{name} would be replaced, .* choose another --output"):
        give(tmp_path)
    assert content_of(tmp_path) == before


def test_other_foreign_files_are_kept(tmp_path: Path) -> None:
    for name in ("notes.txt", "texts/a.txt", ".notes.5.tmp", ".work/mine.txt", ".work/mine/.a.5.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "train").mkdir()
    before = content_of(tmp_path)
    give(tmp_path)
    give(tmp_path, b"other")
    assert content_of(tmp_path).items() >= before.items()


@pytest.mark.parametrize("lost", ["", "manifest.json", "published.json", "report.html", "tokens/000000.arrow"])
def test_files_of_an_earlier_preparation_are_replaced(tmp_path: Path, lost: str) -> None:
    give(tmp_path)
    if lost:
        (tmp_path / lost).unlink()
    manifest = give(tmp_path, b"other", tokens=False)
    assert read_manifest(tmp_path) == manifest
    assert {name.partition("/")[0] for name in content_of(tmp_path)} == {
        *(".prepare.lock", "DATA_CARD.md", "manifest.json", "published.json", "report.html", "report.json"),
        *("tokenizer", "train", "val"),
    }


def test_data_of_an_older_format_and_a_damaged_manifest_can_be_replaced(tmp_path: Path) -> None:
    give(tmp_path)
    (tmp_path / "published.json").unlink()
    manifest = json.loads((tmp_path / "manifest.json").read_bytes())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"format": "packed-rows/1", "row_length": 9}))
    give(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"")
    assert give(tmp_path, b"other") == read_manifest(tmp_path)


def test_a_foreign_file_among_published_ones_is_refused(tmp_path: Path) -> None:
    give(tmp_path)
    (tmp_path / "train" / "mine.txt").write_text("mine")
    before = content_of(tmp_path)
    with pytest.raises(ConfigError, match=r"train/mine\.txt would be replaced"):
        give(tmp_path, b"other")
    assert content_of(tmp_path) == before


def test_a_foreign_file_that_appears_during_the_work_is_refused_before_anything_is_moved(tmp_path: Path) -> None:
    before = give(tmp_path)
    with exclusive(tmp_path) as folder:
        (tmp_path / "val" / "mine.txt").write_text("mine")
        with pytest.raises(ConfigError, match=r"val/mine\.txt would be replaced"):
            publish(tmp_path, folder.start_work(before.fingerprint), before, {})
    assert read_manifest(tmp_path) == before
    assert (tmp_path / "val" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("num_renames", range(16))
def test_a_preparation_killed_while_it_publishes_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_renames: int
) -> None:
    give(tmp_path)
    rename, done = Path.rename, []

    def killed(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp"):  # a temporary file, not a move of the swap
            return rename(path, target)
        if len(done) == num_renames:
            raise KeyboardInterrupt
        done.append(path)
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            give(tmp_path, b"second")
    assert give(tmp_path, b"third") == read_manifest(tmp_path)
    assert (tmp_path / "train" / "a-00000.arrow").read_bytes() == b"third"


def found(directory: Path, manifest: Manifest) -> Manifest | None:
    return reuse_finished(directory, manifest.fingerprint)


def test_published_data_is_found_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = give(tmp_path)
    monkeypatch.setattr("data_pipeline.publishing.publish.digest_file", lambda path: pytest.fail(f"{path} was read"))
    assert found(tmp_path, manifest) == manifest


@pytest.mark.parametrize("name", ["train/a-00000.arrow", "tokens/000000.arrow", "tokenizer/bytes.json"])
@pytest.mark.parametrize("data", [b"", b"r0ws"], ids=["emptied", "changed"])
def test_a_damaged_file_is_found_even_with_its_old_size_and_mtime(tmp_path: Path, name: str, data: bytes) -> None:
    manifest = give(tmp_path)
    before = (tmp_path / name).stat()
    (tmp_path / name).write_bytes(data)
    os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found(tmp_path, manifest) is None


def test_a_copy_is_digested_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = give(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy", copy_function=shutil.copyfile)
    assert found(tmp_path / "copy", manifest) == manifest
    monkeypatch.setattr("data_pipeline.publishing.publish.digest_file", lambda path: pytest.fail(f"{path} was read"))
    assert found(tmp_path / "copy", manifest) == manifest


def damage_unseen(directory: Path, name: str) -> None:
    """Change bytes as a failing device does: size and times stay the same."""
    (directory / name).write_bytes(b"r0ws")
    note = json.loads((directory / "published.json").read_bytes())
    status = (directory / name).stat()
    note["files"][name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    (directory / "published.json").write_text(json.dumps(note))


def test_damage_that_changes_no_time_is_known_after_verify_has_found_it(tmp_path: Path) -> None:
    manifest = give(tmp_path)
    damage_unseen(tmp_path, "tokens/000000.arrow")
    assert found(tmp_path, manifest) == manifest
    with pytest.raises(PreparedDataError, match="run `prepare` again"):
        verify(tmp_path)
    assert found(tmp_path, manifest) is None


def test_damage_that_changes_no_time_is_known_after_a_reader_has_found_it(tmp_path: Path) -> None:
    manifest = give(tmp_path)
    damage_unseen(tmp_path, "train/a-00000.arrow")
    with pytest.raises(PreparedDataError, match="run `prepare` again"):
        Rows(tmp_path, manifest, "train").read(np.arange(1))
    assert found(tmp_path, manifest) is None
