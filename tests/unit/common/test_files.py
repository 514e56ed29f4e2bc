import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import files
from common.files import canonical_json, commit_directory, digest_bytes, digest_file, sealed, sync_upwards, unsealed, write_atomic

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(
    value=st.dictionaries(st.text().filter(lambda key: key != "seal"), json_values, max_size=5),
    at=st.integers(0),
    bit=st.integers(0, 7),
)
def test_a_seal_notices_every_changed_bit(value: dict[str, object], at: int, bit: int) -> None:
    data = bytearray(sealed(value))
    assert unsealed(bytes(data)) == value
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(ValueError, match=r".*"):
        unsealed(bytes(data))


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"b": 1, "a": [1.5, "ü"]}) == canonical_json({"a": [1.5, "ü"], "b": 1})


def test_numbers_that_json_has_no_word_for_are_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"loss": math.nan})


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    assert digest_file(path) == digest_bytes(b"x" * 3_000_000)


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_atomic(path, b"new")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_directory_gets_its_name_with_all_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "a").write_text("1")
    commit_directory(tmp_path / "work", tmp_path / "done")
    assert (tmp_path / "done" / "a").read_text() == "1"
    assert not (tmp_path / "work").exists()


def test_a_directory_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    for name in ("work", "done"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    with pytest.raises(OSError, match="not empty"):
        commit_directory(tmp_path / "work", tmp_path / "done")
    assert (tmp_path / "done" / "a").read_text() == "done"


def test_the_name_of_a_folder_is_forced_to_the_device_up_to_the_mount_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    sync_upwards(tmp_path / "link" / "deep")
    assert synced == [tmp_path / "real" / "deep", tmp_path / "real", tmp_path]


def test_a_folder_above_that_may_not_be_read_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(path: Path) -> None:
        if path == tmp_path.parent:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(files, "sync_directory", sync)
    sync_upwards(tmp_path)
    with pytest.raises(PermissionError):
        sync_upwards(tmp_path.parent)
