"""A rank that fails shows its error and ends, also if the group could not be left."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from common.errors import ConfigError, ExitCode
from trainer.distributed.group import joined_group
from trainer.distributed.network import STORE_VARIABLE

ROOT = Path(__file__).resolve().parents[4]
RANK = """
import sys, time, torch
import torch.distributed as dist
from common.command_line import end_at_once, run_command
from common.errors import ConfigError
from trainer.distributed.group import joined_group
from trainer.launch.first_failure import only_first_failure

def never_returns():
    time.sleep(3600)

def main(_):
    with only_first_failure(), joined_group("cpu") as group:
        group.sum(torch.ones(1))
        dist.destroy_process_group = never_returns
        if group.rank == 1:
            raise ConfigError("rank 1 found a wrong setting")
        group.sum(torch.ones(1))

end_at_once(run_command(main, []))
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that join and leave a group of two ranks."""
    made: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: made.append("join"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: made.append("leave"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return made


def test_a_rank_leaves_the_group_at_the_end(calls: list[str]) -> None:
    with joined_group("cpu") as group:
        assert group.world_size == 2
    assert calls == ["join", "leave"]


def test_a_rank_that_fails_does_not_wait_for_the_group(calls: list[str]) -> None:
    with pytest.raises(ConfigError, match="wrong"), joined_group("cpu"):
        raise ConfigError("wrong")
    assert calls == ["join"]


def test_the_error_of_a_rank_is_shown_and_both_ranks_end(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            cwd=ROOT,
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TRAINER_EXIT_FILE": ""}
            | {STORE_VARIABLE: str(tmp_path), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        other, failed = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert failed == "error: rank 1 found a wrong setting\n"
    assert "rank 0 lost its connection" in other
    assert [rank.returncode for rank in ranks] == [ExitCode.CRASHED, ExitCode.CONFIG]


def test_a_crash_prints_its_traceback_and_ends_without_destructors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def crash(*_: object) -> None:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr("common.command_line.run_command", crash)
    monkeypatch.setattr("common.command_line.end_at_once", codes.append)
    runpy.run_module("trainer", run_name="__main__")
    assert codes == [ExitCode.CRASHED]
    assert "RuntimeError: a fault of the program" in capsys.readouterr().err
