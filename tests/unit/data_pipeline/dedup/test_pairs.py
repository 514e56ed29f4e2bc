from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.dataset.tables import TableWriter
from data_pipeline.dedup.duplicates import FATES_SCHEMA
from data_pipeline.dedup.keys import ENTRIES_SCHEMA, entries_path
from data_pipeline.dedup.pairs import (
    BucketTask,
    are_dropped,
    cut_evenly,
    distinct,
    find_candidates,
    only_shared,
    pair_up,
    read_bucket,
    read_pairs,
    take_copies,
)

entries = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.integers(0, 30)), max_size=60, unique=True)


def columns(rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    keys, checks, ids = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(keys, np.uint64), np.array(checks, np.uint32), np.array(ids, np.uint64)


def group(keys: list[int], ids: list[int], num_first: int) -> list[tuple[int, int]]:
    pairs = pair_up(np.array(keys, np.uint64), np.array(ids, np.uint64), num_first)
    return [pair for later, earlier in pairs for pair in zip(later.tolist(), earlier.tolist(), strict=True)]


@given(entries)
def test_only_entries_that_share_a_key_are_kept(rows: list[tuple[int, int, int]]) -> None:
    found = list(zip(*(column.tolist() for column in only_shared(*columns(rows))), strict=True))
    keys = [key for key, _, _ in rows]
    assert found == sorted(row for row in rows if keys.count(row[0]) > 1)


@given(entries)
def test_copies_name_the_first_equal_document_and_only_that_one_stays_in_the_bands(rows: list[tuple[int, int, int]]) -> None:
    (later, earlier), keys, ids = take_copies(*only_shared(*columns(rows)))
    kinds = {(key, check): sorted(i for k, c, i in rows if (k, c) == (key, check)) for key, check, _ in rows}
    copies = [(each, members[0]) for (key, _), members in kinds.items() if key % 2 for each in members[1:]]
    assert sorted(zip(later.tolist(), earlier.tolist(), strict=True)) == sorted(copies)
    assert later.tolist() == sorted(later.tolist())
    shared = {key for key, _, _ in rows if [k for k, _, _ in rows].count(key) > 1}
    firsts = [(key, members[0]) for (key, _), members in kinds.items() if key % 2 == 0 and key in shared]
    assert list(zip(keys.tolist(), ids.tolist(), strict=True)) == sorted(firsts)


@pytest.mark.parametrize("num_first", [1, 4])
def test_a_small_group_is_paired_completely(num_first: int) -> None:
    members = list(range(0, 2 * (num_first + 2), 2))
    pairs = group([8] * len(members), members, num_first)
    assert sorted(pairs) == [(later, earlier) for later in members for earlier in members if earlier < later]


def test_a_large_group_makes_few_pairs_that_connect_all_of_it() -> None:
    pairs = group([8] * 1000, list(range(1000)), 4)
    assert len(pairs) <= 5 * 1000
    assert {(later, later - 1) for later in range(1, 1000)} | {(later, 0) for later in range(1, 1000)} <= set(pairs)


def test_different_keys_are_not_paired() -> None:
    assert group([2, 2, 4, 4, 4], [1, 5, 0, 1, 5], 4) == [(1, 0), (5, 0), (5, 1), (5, 1)]
    assert group([], [], 4) == []


def write_entries(path: Path, rows: list[tuple[int, int, int]]) -> None:
    with TableWriter(entries_path(path), ENTRIES_SCHEMA) as table:
        for half in (rows[::2], rows[1::2]):
            keys, checks, ordinals = columns(sorted(half))
            table.write(pa.record_batch([keys, checks, ordinals.astype(np.uint32)], schema=ENTRIES_SCHEMA))


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 7])
def test_every_entry_is_in_one_bucket(tmp_path: Path, num_buckets: int) -> None:
    top = 1 << 64
    borders = [bucket * top // num_buckets for bucket in range(num_buckets)]
    keys = sorted({key % top for border in [*borders, top] for key in (border - 1, border, border + 1)})
    write_entries(tmp_path / "000003", [(key, 0, place) for place, key in enumerate(keys)])
    found = []
    for bucket in range(num_buckets):
        of_bucket, _, ids = read_bucket(BucketTask(bucket, num_buckets, (3,), tmp_path, tmp_path / "bucket"))
        assert all(bucket * top // num_buckets <= key < (bucket + 1) * top // num_buckets for key in of_bucket.tolist())
        found += [(key, identity - (3 << 32)) for key, identity in zip(of_bucket.tolist(), ids.tolist(), strict=True)]
    assert sorted(found) == [(key, place) for place, key in enumerate(keys)]


def test_pairs_are_read_by_ranges_of_the_later_document(tmp_path: Path) -> None:
    for number in (0, 1):
        rows = [(key, number, 2 * place + number) for place, key in enumerate([2, 2, 6, 6, 6, 9, 9])]
        write_entries(tmp_path / f"{number:06d}", rows)
    tasks = [BucketTask(bucket, 2, (0, 1), tmp_path, tmp_path / f"bucket-{bucket}") for bucket in range(2)]
    for task in tasks:
        find_candidates(task)
    outputs = [task.output for task in tasks]
    whole = list(zip(*(ids.tolist() for ids in read_pairs(outputs, 0, (1 << 64) - 1)), strict=True))
    assert whole
    assert whole == sorted(set(whole))
    cut = 1 << 32 | 3
    parts = [read_pairs(outputs, *bounds) for bounds in ((0, cut), (cut, (1 << 64) - 1))]
    assert [pair for part in parts for pair in zip(*(ids.tolist() for ids in part), strict=True)] == whole
    assert all(later < cut for later in parts[0][0].tolist())


@given(st.lists(st.integers(0, 1 << 40), max_size=50), st.integers(1, 9))
def test_the_ranges_of_verification_cover_all_ids_once(samples: list[int], per_task: int) -> None:
    ranges = cut_evenly(samples, per_task)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == (1 << 64) - 1
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(lower < upper for lower, upper in ranges)
    if len(set(samples)) == len(samples):
        assert all(sum(lower <= sample < upper for sample in samples) <= per_task for lower, upper in ranges)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_distinct_pairs_are_sorted_and_unique(pairs: list[tuple[int, int]]) -> None:
    found = distinct(*(np.array([pair[place] for pair in pairs], np.uint64) for place in (0, 1)))
    assert list(zip(*(ids.tolist() for ids in found), strict=True)) == sorted(set(pairs))


@given(st.lists(st.integers(0, 40)), st.dictionaries(st.integers(0, 40), st.integers(0, 2), min_size=1), st.integers(1, 10))
def test_dropped_documents_are_found_in_any_batch(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], fates: dict[int, int], rows: int
) -> None:
    output = tmp_path_factory.mktemp("resolved") / "resolved"
    known = sorted(fates)
    with TableWriter(output, FATES_SCHEMA) as table:
        for begin in range(0, len(known), rows):
            some = known[begin : begin + rows]
            values = [some, [fates[each] for each in some], [b"\0" * 16] * len(some), some]
            table.write(pa.record_batch(list(map(pa.array, values, FATES_SCHEMA.types)), schema=FATES_SCHEMA))
    assert are_dropped(np.array(ids, np.uint64), output).tolist() == [fates.get(identity, 0) > 0 for identity in ids]
