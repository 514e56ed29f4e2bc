import errno
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PreparedDataError
from common.files import digest_file
from data_pipeline.dataset.loss_mask import LossMask
from data_pipeline.dataset.manifest import MASKED_FORMAT, Manifest, ShardEntry
from data_pipeline.dataset.shards import Rows, ShardContent, token_type, write_shard

LENGTH = 12


def content_of(rows: list[list[int]], first_token: int = 1) -> ShardContent:
    """Return rows with segments of these lengths. Tokens and document ids count up."""
    segments = [length for row in rows for length in row]
    tokens = np.zeros((len(rows), LENGTH), np.uint16)
    token = first_token
    for number, row in enumerate(rows):
        tokens[number, : sum(row)] = np.arange(token, token + sum(row))
        token += sum(row)
    return ShardContent(
        tokens,
        np.array(segments, np.uint32),
        np.arange(first_token, first_token + len(segments), dtype=np.uint64),
        np.array([len(row) for row in rows]),
    )


def write(folder: Path, *shards: tuple[str, str, list[list[int]]]) -> tuple[Manifest, list[ShardContent]]:
    """Write prepared data with shards of (split, source, rows)."""
    entries, contents = [], []
    for number, (split, source, rows) in enumerate(shards):
        path = folder / split / f"{source}-{number:05d}.arrow"
        path.parent.mkdir(exist_ok=True)
        content = content_of(rows, 1 + 100 * number)
        write_shard(path, content)
        entries.append(
            ShardEntry(
                f"{split}/{path.name}",
                split,
                source,
                len(rows),
                content.num_tokens,
                content.num_targets,
                path.stat().st_size,
                digest_file(path),
            )
        )
        contents.append(content)
    names = tuple(dict.fromkeys(source for _, source, _ in shards))
    manifest = Manifest("", LENGTH, 1000, "uint16", "byte", "", names, tuple(entries), {}, (), (), {}, {})
    return manifest, contents


def segments_of(row: list[int]) -> list[int]:
    numbers = [number for number, length in enumerate(row) for _ in range(length)]
    return numbers + [-1] * (LENGTH - len(numbers))


segment_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda row: sum(row) <= LENGTH)
shard_rows = st.lists(segment_lengths, min_size=1, max_size=6)


@given(shards=st.lists(shard_rows, min_size=1, max_size=4), data=st.data())
def test_rows_come_back_in_the_order_asked_for(
    shards: list[list[list[int]]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    manifest, contents = write(folder, *(("train", f"s{n % 2}", rows) for n, rows in enumerate(shards)))
    rows = Rows(folder, manifest, "train")
    tokens = np.concatenate([content.tokens_RL for content in contents])
    lengths = [row for shard in shards for row in shard]
    sources = [number % 2 for number, shard in enumerate(shards) for _ in shard]
    documents = np.split(np.concatenate([c.documents_S for c in contents]), np.cumsum([len(row) for row in lengths]))
    assert len(rows) == len(lengths)
    asked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    indices = np.array(asked, np.int64)
    batch = rows.read(indices)
    assert batch.tokens_BL.tolist() == tokens[indices].tolist()
    assert batch.segments_BL.tolist() == [segments_of(lengths[index]) for index in asked]
    assert rows.num_targets(indices).tolist() == [sum(length - 1 for length in lengths[index]) for index in asked]
    assert rows.num_sequences(indices).tolist() == [sum(length > 1 for length in lengths[index]) for index in asked]
    assert rows.source_ids(indices).tolist() == [sources[index] for index in asked]
    assert all(rows.document_ids(index).tolist() == documents[index].tolist() for index in asked)


@given(shards=st.lists(shard_rows, min_size=1, max_size=3), data=st.data())
def test_a_loss_mask_comes_back_and_decides_about_targets(
    shards: list[list[list[int]]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("masked")
    manifest, contents = write(folder, *(("train", "a", rows) for rows in shards))
    expected: list[list[bool]] = []
    entries = []
    for entry, content, of_rows in zip(manifest.shards, contents, shards, strict=True):
        sizes = [sum(row) for row in of_rows]
        masks = data.draw(st.tuples(*(st.lists(st.booleans(), min_size=size, max_size=size) for size in sizes)))
        is_masked = data.draw(st.booleans())
        mask = LossMask.of(np.array([one for row in masks for one in row]), np.array(sizes)) if is_masked else None
        entries.append(overwrite(folder, entry, replace(content, mask=mask)))
        expected += [row if is_masked else [True] * len(row) for row in masks]
    rows = Rows(folder, replace(manifest, shards=tuple(entries), format=MASKED_FORMAT), "train")
    asked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=10))
    indices = np.array(asked, np.int64)
    found = rows.read(indices).has_loss_BL
    lengths = [row for shard in shards for row in shard]
    for place, index in enumerate(asked):
        size = sum(lengths[index])
        assert (found is None and all(expected[index])) or found[place, :size].tolist() == expected[index]  # type: ignore[index]
        firsts = np.cumsum([0, *lengths[index]])
        targets = [sum(expected[index][start + 1 : end]) for start, end in pairwise(firsts.tolist())]
        assert rows.num_targets(np.array([index])).tolist() == [sum(targets)]
        assert rows.num_sequences(np.array([index])).tolist() == [sum(count > 0 for count in targets)]
    assert sum(entry.targets for entry in entries) == rows.num_targets(np.arange(len(rows))).sum()


def overwrite(folder: Path, entry: ShardEntry, content: ShardContent) -> ShardEntry:
    """Write a shard in the place of another, and return its entry in the manifest."""
    write_shard(folder / entry.path, content)
    path = folder / entry.path
    return replace(entry, targets=content.num_targets, bytes=path.stat().st_size, sha256=digest_file(path))


@pytest.mark.parametrize(
    ("runs", "counts", "message"),
    [
        ([2, 4], [2], "the runs of a loss mask have 6 tokens, but there are 7"),
        ([2**32 - 1, 8], [2], "the runs of a loss mask have"),
        ([3, 0, 4], [3], "a run of a loss mask is empty"),
    ],
)
def test_a_loss_mask_that_does_not_fit_its_row_is_refused(tmp_path: Path, runs: list[int], counts: list[int], message: str) -> None:
    manifest, [content] = write(tmp_path, ("train", "a", [[3, 4]]))
    mask = LossMask(np.array(runs, np.uint32), np.array(counts))
    plain = ShardContent(content.tokens_RL, content.segments_S, content.documents_S, content.num_segments_R)
    entry = overwrite(tmp_path, manifest.shards[0], plain)
    with patch.object(LossMask, "num_targets", return_value=np.zeros(2, np.int64)):
        entry = overwrite(tmp_path, entry, replace(plain, mask=mask))
    rows = Rows(tmp_path, replace(manifest, shards=(entry,), format=MASKED_FORMAT), "train")
    with pytest.raises(PreparedDataError, match=message):
        rows.num_targets(np.array([0]))


def test_a_loss_mask_in_data_of_the_older_format_is_refused(tmp_path: Path) -> None:
    manifest, [content] = write(tmp_path, ("train", "a", [[3, 4]]))
    entry = overwrite(tmp_path, manifest.shards[0], replace(content, mask=LossMask(np.empty(0, np.uint32), np.zeros(1, np.int64))))
    with pytest.raises(PreparedDataError, match="loss_runs"):
        Rows(tmp_path, replace(manifest, shards=(entry,)), "train").read(np.array([0]))


def test_a_split_without_shards_has_no_rows(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3]]))
    rows = Rows(tmp_path, manifest, "val")
    assert len(rows) == 0
    assert rows.read(np.array([], np.int64)).tokens_BL.shape == (0, LENGTH)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_row_that_is_not_there_is_refused(tmp_path: Path, index: int) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3], [4]]))
    with pytest.raises(IndexError, match="are requested, but there are 2 rows"):
        Rows(tmp_path, manifest, "train").read(np.array([index]))


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_shard(tmp_path / name, content_of([[3, 4], [12], [1]]))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@given(at=st.integers(0, 10**9), bit=st.integers(0, 7))
def test_any_changed_bit_of_a_shard_is_found_at_first_use(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    manifest, _ = write(folder, ("train", "a", [[3, 4], [12]]))
    path = folder / manifest.shards[0].path
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(PreparedDataError, match=r"a-00000\.arrow: its digest is sha256:.* run `prepare` again"):
        Rows(folder, manifest, "train").read(np.array([0]))


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("keep", [0, 1, -1])
def test_a_shard_cut_short_is_refused_and_never_mapped(tmp_path: Path, keep: int, verify: bool) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3, 4], [12]]))
    path = tmp_path / manifest.shards[0].path
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PreparedDataError, match=r"bytes, but the manifest says .* the file was changed"):
        Rows(tmp_path, manifest, "train", verify=verify).num_targets(np.array([0]))


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3]]))
    (tmp_path / manifest.shards[0].path).unlink()
    with pytest.raises(PreparedDataError, match=r"a-00000\.arrow: missing"):
        Rows(tmp_path, manifest, "train").read(np.array([0]))


def test_a_file_of_the_right_size_that_is_no_shard_is_refused_without_its_digest_too(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3]]))
    path = tmp_path / manifest.shards[0].path
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(PreparedDataError, match="this shard cannot be read"):
        Rows(tmp_path, manifest, "train", verify=False).read(np.array([0]))


def test_a_shard_that_contradicts_the_manifest_is_refused(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3]]))
    wrong = replace(manifest, shards=(replace(manifest.shards[0], rows=2),))
    with pytest.raises(PreparedDataError, match="this shard cannot be read"):
        Rows(tmp_path, wrong, "train").read(np.array([1]))


def test_only_shards_that_are_asked_for_are_opened(tmp_path: Path) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3]]), ("train", "a", [[4]]))
    (tmp_path / manifest.shards[1].path).unlink()
    assert Rows(tmp_path, manifest, "train").num_targets(np.array([0])).tolist() == [2]


def test_rows_that_are_open_outlive_the_files_they_came_from(tmp_path: Path) -> None:
    manifest, [content] = write(tmp_path, ("train", "a", [[3, 4], [12]]))
    rows = Rows(tmp_path, manifest, "train")
    rows.num_targets(np.array([0]))
    (tmp_path / manifest.shards[0].path).unlink()
    assert rows.read(np.array([1, 0])).tokens_BL.tolist() == content.tokens_RL[::-1].tolist()


@pytest.mark.parametrize(("vocab_size", "name"), [(65_536, "uint16"), (65_537, "uint32")])
def test_ids_take_two_bytes_where_they_fit(vocab_size: int, name: str) -> None:
    assert token_type(vocab_size).name == name


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
        lambda path: path.write_bytes(path.read_bytes()),
    ],
    ids=["cut short", "emptied", "longer", "written over"],
)
def test_a_shard_that_changes_under_the_reader_is_refused_by_name(tmp_path: Path, change: Callable[[Path], object]) -> None:
    manifest, _ = write(tmp_path, ("train", "a", [[3], [2, 1]]))
    rows = Rows(tmp_path, manifest, "train")
    rows.read(np.array([0]))
    path = tmp_path / manifest.shards[0].path
    change(path)
    os.utime(path)  # two writes within one clock tick can leave the same time
    with pytest.raises(PreparedDataError, match=rf"{path.name}: this shard was changed while it was read"):
        rows.read(np.array([0]))


@given(shards=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=8))
def test_the_ranges_of_the_sources_are_their_rows_and_neighbours_are_joined(shards: list[tuple[str, int]]) -> None:
    entries = tuple(ShardEntry(f"{n}.arrow", "train", source, count, 0, 0, 0, "") for n, (source, count) in enumerate(shards))
    rows = Rows(Path(), Manifest("", LENGTH, 1000, "uint16", "byte", "", ("a", "b", "c"), entries, {}, (), (), {}, {}), "train")
    ranges = rows.source_ranges()
    sources = rows.source_ids(np.arange(len(rows))).tolist()
    for source, found in enumerate(ranges):
        assert [row for first, end in found for row in range(first, end)] == [n for n, s in enumerate(sources) if s == source]
        assert all(end < later for (_, end), (later, _) in pairwise(found))
        assert all(first < end for first, end in found)


@pytest.mark.parametrize("fails", ["data_pipeline.dataset.manifest.digest_stream", "data_pipeline.dataset.shards.os.fstat"])
def test_a_failing_disk_is_reported_with_the_shard_and_the_next_read_opens_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    manifest, [content] = write(tmp_path, ("train", "a", [[3], [2, 1]]))
    rows = Rows(tmp_path, manifest, "train")

    def fail(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    if fails.endswith("fstat"):
        rows.read(np.array([0]))
    with monkeypatch.context() as patch:
        patch.setattr(fails, fail)
        with pytest.raises(OSError, match=r"Stale file handle: '.*train/a-00000\.arrow'"):
            rows.read(np.array([0]))
    (tmp_path / manifest.shards[0].path).rename(tmp_path / "kept")  # only a shard that is opened again notices this
    with pytest.raises(PreparedDataError, match="missing"):
        rows.read(np.array([0]))
    (tmp_path / "kept").rename(tmp_path / manifest.shards[0].path)
    assert rows.read(np.array([0])).tokens_BL.tolist() == content.tokens_RL[:1].tolist()
