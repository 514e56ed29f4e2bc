"""Folders of a training: planted readings, and real folders without access."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.runs import ROOT
from trainer.doctor import disk
from trainer.doctor.check import Check, Severity, refuse_errors
from trainer.doctor.disk import DiskReading, Rates, check_disk, measure_rates, read_disk

GOOD = DiskReading("run", Path("/workspace"), 1000, 1000, 0o755, 10**12, 2 * 10**12, 10**6)


def rows(reading: DiskReading, writes: bool = True) -> dict[str, Check]:
    return {one.name: one for one in check_disk(reading, writes=writes)}


def test_a_folder_of_its_user_with_space_has_no_problem() -> None:
    assert {one.severity for one in rows(GOOD).values()} == {Severity.OK}
    assert rows(GOOD)["run folder"].found == "/workspace belongs to user 1000, group 1000, mode 755"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder that belongs to root")
def test_a_volume_of_root_is_an_error_for_another_user_with_the_command_that_corrects_it(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o005)
        if folder == Path("/tmp"):
            break
    (tmp_path / "volume").mkdir(mode=0o755)
    program = (
        "import os, sys; from pathlib import Path; from trainer.doctor.disk import read_disk, check_disk\n"
        "from trainer.doctor.check import refuse_errors\n"
        "os.setgroups([]); os.setgid(1000); os.setuid(1000)\n"
        "row = check_disk(read_disk('run', Path(sys.argv[1]) / 'new', writes=True), writes=True)[0]\n"
        "print(row.severity.name, '|', row.found, '|', row.remedy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "volume")], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    severity, found, remedy = done.stdout.split(" | ")
    assert severity == "ERROR"
    assert "permission denied for user 1000" in found
    assert "belongs to user 0, group 0, with mode 755" in found
    assert "give this user access" in remedy


def test_a_problem_of_a_folder_is_an_error_with_its_remedy() -> None:
    found = rows(
        replace(GOOD, problem="permission denied for user 1000, group 1000", remedy="on the host, run `chown -R 1000:1000`")
    )
    assert list(found) == ["run folder"]
    assert found["run folder"].remedy == "on the host, run `chown -R 1000:1000`"
    with pytest.raises(ConfigError, match="run folder"):
        refuse_errors(found.values())


@pytest.mark.parametrize(
    ("free", "files", "severity"),
    [
        (10**12, 10**6, Severity.OK),
        (10**12, None, Severity.OK),
        (5 * 10**9, 10**6, Severity.WARNING),
        (5 * 10**7, 10**6, Severity.ERROR),
        (10**12, 0, Severity.ERROR),
    ],
)
def test_a_full_disk_is_an_error_and_one_with_little_space_a_warning(free: int, files: int | None, severity: Severity) -> None:
    row = rows(replace(GOOD, free_bytes=free, free_files=files))["run space"]
    assert row.severity is severity
    assert bool(row.remedy) == (severity > Severity.OK)
    assert "run space" not in rows(replace(GOOD, free_bytes=free), writes=False)


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_that_is_full_is_found_by_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, call, full)
    found = read_disk("run", tmp_path, writes=True, measures=True)
    assert "no space left on the device" in found.problem
    assert "make room" in found.remedy
    assert found.rates is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rates", "severity"),
    [
        (Rates(5e8, 1e9, 0.002), Severity.OK),
        (Rates(2e6, 1e9, 0.002), Severity.WARNING),
        (Rates(5e8, 3e6, 0.002), Severity.WARNING),
        (Rates(5e8, 1e9, 0.7), Severity.WARNING),
        (Rates(read_per_s=1e9), Severity.OK),
    ],
)
def test_a_slow_disk_is_a_warning_with_its_rates(rates: Rates, severity: Severity) -> None:
    row = rows(replace(GOOD, rates=rates))["run disk"]
    assert row.severity is severity
    assert ("local SSD" in row.remedy) == (severity > Severity.OK)
    assert "read" in row.found


def test_rates_are_bytes_by_seconds_and_the_file_is_removed(tmp_path: Path) -> None:
    ticks = iter(range(10**6))
    found = measure_rates(tmp_path, 8 << 20, lambda: next(ticks))
    assert found.written_per_s == (8 << 20) / 3  # the clock advances a second with each call: two blocks and the end
    assert found.fsync_s == 1
    assert found.read_per_s is not None
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_of_a_slow_disk_ends_in_time(tmp_path: Path) -> None:
    ticks = iter(range(0, 10**6, 5))
    assert measure_rates(tmp_path, 1 << 40, lambda: next(ticks)).written_per_s is not None


def test_a_folder_that_does_not_exist_is_judged_by_its_nearest_parent(tmp_path: Path) -> None:
    found = read_disk("run", tmp_path / "runs/first", writes=True)
    assert (found.path, found.problem) == (tmp_path, "")
    assert found.free_bytes <= found.total_bytes
    assert list(tmp_path.iterdir()) == []


def test_the_data_is_read_and_never_written(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.arrow").write_bytes(bytes(5 << 20))
    before = sorted(tmp_path.rglob("*"))
    found = read_disk("data", tmp_path, writes=False, measures=True)
    assert found.rates is not None
    assert found.rates.written_per_s is None
    assert found.rates.read_per_s is not None
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_must_exist_is_not_judged_by_its_parent(tmp_path: Path) -> None:
    found = read_disk("temporary", tmp_path / "none", writes=True, may_be_new=False)
    assert found.problem == f"{tmp_path / 'none'}: no such folder"
    assert f"mkdir -p {tmp_path / 'none'}" in found.remedy
    assert "TMPDIR" in found.remedy
    assert read_disk("temporary", tmp_path, writes=True, may_be_new=False).problem == ""


def test_a_file_in_place_of_a_folder_or_of_its_parent_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/run/a"):
        assert "is a file, and a folder is needed there" in read_disk("run", path, writes=True).problem


@pytest.mark.parametrize(("free", "severity"), [(15 << 20, Severity.OK), (13 << 20, Severity.WARNING), (11 << 20, Severity.ERROR)])
def test_the_space_is_compared_with_the_needs_of_the_run_if_they_are_known(free: int, severity: Severity) -> None:
    [row] = [
        one for one in check_disk(replace(GOOD, free_bytes=free), (12 << 20, 14 << 20), writes=True) if one.name == "run space"
    ]
    assert (row.severity, row.needed) == (severity, "14.7 MB or more for the checkpoints of this run")
