"""Finished data is replaced by other data only on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.locks import reading
from data_pipeline.publishing.publish import check_may_replace, list_differences
from tests.support.prepared import write_prepared

FILE = {"source": "a", "path": "x.txt", "bytes": 1, "sha256": "sha256:0"}


def check(directory: Path, *, replace: bool = False, fingerprint: str = "sha256:1", **settings: Any) -> None:
    check_may_replace(directory, fingerprint, settings, [FILE], replace=replace)


def test_other_data_is_replaced_only_on_request(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, row_length=8)
    told = str(refused.value)
    assert "row_length was not set and is 8; 1 input file is added (a/x.txt)" in told
    assert "another --output" in told
    assert "--replace true (PREP_REPLACE=true)" in told
    check(tmp_path, replace=True)


def test_the_same_data_may_be_prepared_again(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    check(tmp_path, fingerprint="")


def test_data_in_use_is_not_replaced_even_on_request(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    with reading(tmp_path, "run a"):
        for fingerprint in ("", "sha256:1"):
            with pytest.raises(ConfigError, match="in use by run a, process"):
                check(tmp_path, replace=True, fingerprint=fingerprint)


def test_data_of_another_version_counts_as_finished_and_data_with_a_damaged_manifest_does_not(tmp_path: Path) -> None:
    write_prepared(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_bytes())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"format": "packed-rows/1"}))
    with pytest.raises(ConfigError, match="made by another version of this program"):
        check(tmp_path)
    check(tmp_path, replace=True)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"row_length": 9}))
    check(tmp_path)
    (tmp_path / MANIFEST).unlink()
    check(tmp_path)


def test_the_list_of_differences_is_short_for_any_number_of_them() -> None:
    settings = {f"setting_{number}": {"value": number} for number in range(9)}
    files = [FILE | {"path": f"{number}.txt"} for number in range(9)]
    told = "; ".join(list_differences({}, settings, files, [files[0] | {"bytes": 2}, FILE]))
    assert "setting_0.value was not set and is 0" in told
    assert "6 more settings differ" in told
    assert "1 input file is added (a/x.txt)" in told
    assert "8 input files are missing (a/1.txt, a/2.txt, a/3.txt and 5 more)" in told
    assert "1 input file is changed (a/0.txt)" in told
    assert list_differences({"a": ["x" * 900]}, {"a": None}, [], [])[0].endswith("and is not set")
    assert len(list_differences({"a": ["x" * 900]}, {"a": None}, [], [])[0]) < 100
    assert list_differences({}, {}, files, files[::-1]) == ["the sources are in another order"]
    assert list_differences({"a": {}}, {"a": {}}, files, files) == []
