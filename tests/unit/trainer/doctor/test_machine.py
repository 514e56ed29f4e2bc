"""The lock, and the versions of PyTorch."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from common.paths import ENV
from trainer.doctor.check import Severity
from trainer.doctor.inputs import Needs
from trainer.doctor.machine import check_lock, check_versions
from trainer.machine import environment


def test_a_lock_that_was_changed_is_a_warning_that_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ENV / "requirements.lock", tmp_path)
    monkeypatch.setattr(environment, "ENV", tmp_path)
    lock = tmp_path / "requirements.lock"
    lock.write_text(re.sub(r"(?m)^tqdm==\S+", "tqdm==0.0.1", lock.read_text()))
    row = check_lock(environment.lock_name(), environment.unlocked_packages_here())
    assert (row.severity, "tqdm" in row.found, "(lock: 0.0.1)" in row.found) == (Severity.WARNING, True, True)
    assert "env/make-venv" in row.remedy
    assert check_lock("requirements.lock", {}).severity is Severity.OK
    assert check_lock(None, {}).severity is Severity.WARNING


def test_another_version_of_a_library_is_a_warning_and_a_missing_library_is_none() -> None:
    needs = Needs("", "13.0", {}, {"TORCH_VERSION": "2.13.0", "CUDA_VERSION": "13.0", "NCCL_VERSION": "2.29.7"})
    assert check_versions({"torch": "2.13.0+cpu", "cuda": None, "nccl": None}, needs).severity is Severity.OK
    row = check_versions({"torch": "2.12.1", "cuda": "13.0", "nccl": "2.29.7"}, needs)
    assert (row.severity, row.needed) == (Severity.WARNING, "torch 2.13.0")
