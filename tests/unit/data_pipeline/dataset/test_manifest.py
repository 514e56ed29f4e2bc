import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PreparedDataError
from data_pipeline.dataset.layout import MANIFEST, REFERENCE, REPORT
from data_pipeline.dataset.manifest import Manifest, ShardEntry, check_digests, read_manifest

DIGEST = f"sha256:{'0' * 64}"
SHARD = ShardEntry("train/a-00000.arrow", "train", "a", 3, 30, 27, 1000, DIGEST)
FILE = {"source": "a", "path": "one.txt", "bytes": 5, "sha256": DIGEST}
SEALED, DATA = Manifest(
    "sha256:11", 10, 260, "uint16", "byte", "sha256:22", ("a",), (SHARD,), {"report.json": DIGEST}, (FILE,), (), {}, {}
).sealed()


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(DATA)
    assert read_manifest(tmp_path) == SEALED
    assert json.loads(DATA)["root_digest"] == SEALED.root_digest


@given(at=st.integers(0, len(DATA) - 1), bit=st.integers(0, 7))
def test_any_changed_bit_is_found(at: int, bit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("flip")
    data = bytearray(DATA)
    data[at] ^= 1 << bit
    (folder / MANIFEST).write_bytes(data)
    try:
        manifest = read_manifest(folder)
    except PreparedDataError:
        return
    assert manifest == SEALED, "a change that alters nothing but white space may pass"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "damaged, not valid JSON"),
        ("[]", "format 'list', but this version reads 'packed-rows/2'"),
        ('{"format": "packed-rows/9"}', "format 'packed-rows/9', but this version reads"),
        ('{"format": "packed-rows/2"}', "it was changed after it was written"),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(PreparedDataError, match=rf"manifest\.json: .*{message}"):
        read_manifest(tmp_path)


def test_a_folder_without_a_manifest_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(PreparedDataError, match=r"holds no finished prepared data; run `trainer prepare --output "):
            read_manifest(folder)


def test_a_reference_model_may_be_larger_than_a_report(tmp_path: Path) -> None:
    for name, most in ((REFERENCE, 4 << 30), (REPORT, 512 << 20)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(5 << 30)
        with pytest.raises(PreparedDataError, match=f"at most {most} can be read"):
            check_digests(tmp_path, {name: "sha256:" + "0" * 64})
