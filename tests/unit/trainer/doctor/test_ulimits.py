"""Limits of the kernel: planted readings, and those of this process."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.runs import tiny_config
from trainer.doctor import machine
from trainer.doctor.check import Check, Severity, refuse_errors
from trainer.doctor.machine import UNLIMITED, Ulimits, check_shared_memory, check_start, check_ulimits, read_ulimits
from trainer.training.start import open as opening
from trainer.training.start.open import opened_run

GOOD = Ulimits(8 << 30, 8 << 30, 1 << 20, UNLIMITED, UNLIMITED)
DOCKER = replace(GOOD, shm_bytes=64 << 20, shm_free_bytes=64 << 20)
"""The default of Docker."""


def rows(reading: Ulimits, num_gpus: int = 2, num_nodes: int = 1, has_peer_access: bool | None = None) -> dict[str, Check]:
    found = check_ulimits(reading, num_gpus=num_gpus, num_nodes=num_nodes, has_peer_access=has_peer_access)
    return {one.name: one for one in found}


def test_good_limits_have_no_remedy() -> None:
    assert {one.severity for one in rows(GOOD, num_nodes=2).values()} == {Severity.OK}
    assert {one.remedy for one in rows(GOOD).values()} == {""}


def test_64_mb_of_shared_memory_is_a_warning_with_several_gpus_and_an_error_if_they_cannot_reach_each_other() -> None:
    row = rows(DOCKER)["shared memory"]
    assert (row.severity, "64.0 MiB" in row.found, "SHM_SIZE=2gb" in row.remedy) == (Severity.WARNING, True, True)
    assert rows(DOCKER, num_gpus=1)["shared memory"].severity is Severity.OK
    assert rows(DOCKER, has_peer_access=True)["shared memory"].severity is Severity.WARNING
    blocked = rows(DOCKER, has_peer_access=False)
    with pytest.raises(ConfigError, match="shared memory"):
        refuse_errors(blocked.values())


def test_a_full_shared_memory_is_not_corrected_by_a_larger_one() -> None:
    row = rows(replace(GOOD, shm_free_bytes=1 << 20))["shared memory"]
    assert (row.severity, "remove files" in row.remedy) == (Severity.WARNING, True)
    assert "does not exist" in check_shared_memory(replace(GOOD, shm_bytes=None, shm_free_bytes=None), num_gpus=2).found


def test_few_open_files_a_small_stack_and_locked_memory_between_nodes_are_warnings() -> None:
    low = rows(replace(GOOD, open_files=1024, stack_bytes=1 << 20, locked_bytes=8 << 20), num_nodes=2)
    assert {name for name, one in low.items() if one.severity is Severity.WARNING} == {"open files", "stack", "locked memory"}
    assert "default-ulimits" in low["open files"].remedy
    assert "ULIMIT_MEMLOCK" in low["locked memory"].remedy
    assert rows(replace(GOOD, locked_bytes=8 << 20))["locked memory"].severity is Severity.OK


def test_the_limits_of_this_process_are_read(tmp_path: Path) -> None:
    found = read_ulimits(tmp_path)
    assert found.shm_bytes is not None
    assert found.shm_free_bytes is not None
    assert 0 < found.shm_free_bytes <= found.shm_bytes
    assert found.open_files == UNLIMITED or found.open_files >= 256
    assert read_ulimits(tmp_path / "none").shm_bytes is None


def test_the_start_of_a_training_warns_of_a_small_shared_memory_and_refuses_one_that_cannot_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    access = True
    monkeypatch.setattr(machine, "has_peer_access", lambda _: access)
    with caplog.at_level(logging.WARNING):
        check_start(1, DOCKER)
        check_start(2, GOOD)
        assert caplog.messages == []
        check_start(2, DOCKER)
    [said] = caplog.messages
    assert "SHM_SIZE=2gb" in said
    access = False
    with pytest.raises(ConfigError, match="SHM_SIZE=2gb"):
        check_start(2, DOCKER)


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_the_first_rank_of_a_node_checks_the_machine_before_it_joins_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_rank: str
) -> None:
    checked: list[int] = []

    def joined(*_: object) -> None:
        raise ConfigError("joins")

    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(opening, "check_start", checked.append)
    monkeypatch.setattr(opening, "joined_group", joined)
    with pytest.raises(ConfigError, match="joins"), opened_run(tiny_config(tmp_path, tmp_path / "run")):
        pass
    assert checked == ([0] if local_rank == "0" else [])
