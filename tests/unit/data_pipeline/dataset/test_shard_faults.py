from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import PreparedDataError
from common.files import digest_file
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows, ShardError
from tests.support.prepared import write_prepared

FIRST, SECOND = "train/a-00000.arrow", "train/b-00000.arrow"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prepared(tmp_path)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("sound"))


def rows_of(data: Path, *, verify: bool = True) -> Rows:
    return Rows(data, read_manifest(data), "train", verify=verify)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(numbers=st.lists(st.integers(0, 60), max_size=12))
def test_rows_of_shards_that_are_left_out_are_padding_and_the_others_as_they_were(sound: Path, numbers: list[int]) -> None:
    rows, indices = rows_of(sound), np.array(numbers, np.int64)
    left = rows.without([SECOND, "train/of-nobody.arrow"])
    whole, found, is_blank = rows.read(indices), left.read(indices), indices >= 30
    assert (found.segments_BL[is_blank] == -1).all()
    assert (found.segments_BL[~is_blank] == whole.segments_BL[~is_blank]).all()
    assert (found.tokens_BL[~is_blank] == whole.tokens_BL[~is_blank]).all()
    assert left.num_targets(indices).tolist() == np.where(is_blank, 0, rows.num_targets(indices)).tolist()
    assert left.num_sequences(indices).tolist() == np.where(is_blank, 0, rows.num_sequences(indices)).tolist()
    assert left.num_rows_in([SECOND], indices) == is_blank.sum()
    assert len(left) == len(rows)


def test_a_shard_that_is_left_out_is_not_opened(data: Path) -> None:
    (data / SECOND).unlink()
    assert rows_of(data).without([SECOND]).document_ids(60).tolist() == []
    with pytest.raises(ShardError, match="missing"):
        rows_of(data).document_ids(60)


def test_whoever_wants_to_know_of_errors_gets_padding_and_the_shard(data: Path) -> None:
    flip(data / SECOND)
    noted: list[ShardError | OSError] = []
    rows = rows_of(data).without([], noted.append)
    batch = rows.read(np.array([0, 60]))
    assert (batch.segments_BL[0] >= 0).any()
    assert (batch.segments_BL[1] == -1).all()
    assert [rows.shard_of(error) for error in noted] == [SECOND]


def test_an_error_of_the_system_is_known_by_its_file(data: Path) -> None:
    rows = rows_of(data)
    assert rows.shard_of(OSError(5, "Input/output error", str(data / FIRST))) == FIRST
    assert rows.shard_of(OSError(5, "Input/output error", str(data / "elsewhere"))) is None
    assert rows.shard_of(PreparedDataError("of all the data")) is None
    assert rows.shard_of(None) is None


@pytest.mark.parametrize("verify", [True, False])
def test_a_shard_that_was_changed_is_taken_again_only_if_it_is_what_was_written(data: Path, verify: bool) -> None:
    rows, content = rows_of(data, verify=verify), (data / SECOND).read_bytes()
    before = rows.read(np.array([60])).tokens_BL.tolist()
    flip(data / SECOND)
    for _ in range(2):
        with pytest.raises(ShardError, match=r"changed while it was read|sha256"):
            rows.read(np.array([60]))
    (data / SECOND).write_bytes(content)
    assert rows.read(np.array([60])).tokens_BL.tolist() == before


@pytest.mark.parametrize("read", [Rows.read, Rows.num_targets])
def test_a_token_beyond_the_vocabulary_is_refused_with_its_number_and_only_where_it_is_read(
    data: Path, read: Callable[..., object]
) -> None:
    path, manifest = data / SECOND, read_manifest(data)
    tokens = rows_of(data).read(np.array([60])).tokens_BL[0]
    wrong = tokens.copy()
    wrong[-1] = manifest.vocab_size
    path.write_bytes(path.read_bytes().replace(tokens.tobytes(), wrong.tobytes()))
    entries = tuple(replace(entry, sha256=digest_file(data / entry.path)) for entry in manifest.shards)
    rows = Rows(data, replace(manifest, shards=entries), "train")
    assert rows.read(np.array([0, 59])).tokens_BL.max() < manifest.vocab_size
    if read is Rows.num_targets:
        rows.num_targets(np.array([60]))
        return
    with pytest.raises(
        ShardError, match=rf"b-00000.arrow: it contains token {manifest.vocab_size}, but the ids of the vocabulary are 0 to"
    ):
        rows.read(np.array([60]))
