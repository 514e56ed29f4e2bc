"""The lock, the versions of PyTorch, and the files that name the versions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from common.paths import ENV
from trainer.doctor.check import Severity
from trainer.doctor.versions import Needs, at_least, check_lock, check_versions, read_needs
from trainer.machine import locks


def test_a_lock_that_was_changed_is_a_warning_that_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ENV / "requirements.lock", tmp_path)
    monkeypatch.setattr(locks, "ENV", tmp_path)
    lock = tmp_path / "requirements.lock"
    lock.write_text(re.sub(r"(?m)^tqdm==\S+", "tqdm==0.0.1", lock.read_text()))
    row = check_lock(locks.lock_name(), locks.unlocked_packages_here())
    assert (row.severity, "tqdm" in row.found, "(lock: 0.0.1)" in row.found) == (Severity.WARNING, True, True)
    assert "env/make-venv" in row.remedy
    assert check_lock("requirements.lock", {}).severity is Severity.OK
    assert check_lock(None, {}).severity is Severity.WARNING


def test_another_version_of_a_library_is_a_warning_and_a_missing_library_is_none() -> None:
    needs = Needs("", "13.0", {}, {"TORCH_VERSION": "2.13.0", "CUDA_VERSION": "13.0", "NCCL_VERSION": "2.29.7"})
    assert check_versions({"torch": "2.13.0+cpu", "cuda": None, "nccl": None}, needs).severity is Severity.OK
    row = check_versions({"torch": "2.12.1", "cuda": "13.0", "nccl": "2.29.7"}, needs)
    assert (row.severity, row.needed) == (Severity.WARNING, "torch 2.13.0")


def test_the_files_name_every_version_that_the_checks_need() -> None:
    needs = read_needs()
    assert at_least("2.20", needs.compose)
    assert int(needs.driver()) >= 500
    assert needs.driver("12.6") == "525"
    assert needs.driver("99.0") == ""


def test_a_version_is_compared_by_its_numbers() -> None:
    assert at_least("2.26", "2.26.1")
    assert at_least("580", "580.65.06")
    assert not at_least("2.26", "2.9")
    assert not at_least("580", "")
