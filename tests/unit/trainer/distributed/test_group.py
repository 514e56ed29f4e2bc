"""Errors of ranks reach the others, and a rank that fails shows its error and ends, also if the group could not be left."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from common.errors import ConfigError, ExitCode, PreparedDataError, ProjectError
from tests.support.ranks import run_ranks
from trainer.distributed.group import Group, RemoteError, joined_group
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
    monkeypatch.setattr("trainer.distributed.group.time", SimpleNamespace(sleep=lambda _: made.append("pause")))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return made


def test_a_rank_leaves_the_group_at_the_end(calls: list[str]) -> None:
    with joined_group("cpu") as group:
        assert group.world_size == 2
    assert calls == ["join", "pause", "leave"]


def test_a_rank_that_fails_does_not_wait_for_the_group(calls: list[str]) -> None:
    with pytest.raises(ConfigError, match="wrong"), joined_group("cpu"):
        raise ConfigError("wrong")
    assert calls == ["join", "pause"]  # the pause: before DDP is destroyed with the frames of the error


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

    monkeypatch.delitem(sys.modules, "trainer.__main__", raising=False)  # another test may have imported it
    monkeypatch.setattr("common.command_line.run_command", crash)
    monkeypatch.setattr("common.command_line.end_at_once", codes.append)
    runpy.run_module("trainer", run_name="__main__")
    assert codes == [ExitCode.CRASHED]
    assert "RuntimeError: a fault of the program" in capsys.readouterr().err


def each(group: Group, failing: tuple[int, ...]) -> tuple[str, str, int]:
    """The kind, message and exit code of what is raised on this rank; or its result."""

    def act() -> str:
        if group.rank in failing:
            raise PreparedDataError(f"no data for rank {group.rank}")
        return f"done {group.rank}"

    try:
        return "", group.on_all(act), 0
    except ProjectError as error:
        return type(error).__name__, str(error), error.exit_code


def test_an_error_on_any_rank_is_raised_on_every_rank_with_its_exit_code() -> None:
    code = int(ExitCode.DATA)
    assert run_ranks(each, 3, ()) == [("", f"done {rank}", 0) for rank in range(3)]
    assert run_ranks(each, 3, (1, 2)) == [
        ("RemoteError", "", code),
        ("PreparedDataError", "no data for rank 1", code),
        ("PreparedDataError", "no data for rank 2", code),
    ]


def test_a_single_rank_raises_its_error() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    assert group.on_all(lambda: 3) == 3

    def fail() -> None:
        raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        group.on_all(fail)
    assert not isinstance(ConfigError("wrong"), RemoteError)


WAITING_RANK = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before torch starts threads
from torch._C._distributed_c10d import FileStore
from trainer.distributed.group import stoppable_wait
print("waits", flush=True)
with stoppable_wait(float(sys.argv[2])):
    FileStore(sys.argv[1], 2).wait(["others"])
print("pending", *(number.name for number in signal.sigpending()))
"""
OTHERS = "import sys; from torch._C._distributed_c10d import FileStore; FileStore(sys.argv[1], 2).set('others', 'here')"


def waiting_rank(store: Path, others_s: float) -> subprocess.Popen[str]:
    """Start a rank that waits in C++."""
    rank = subprocess.Popen(
        [sys.executable, "-c", WAITING_RANK, store, str(others_s)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "waits\n"
    return rank


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_code_of_a_stop_if_the_others_do_not_come(tmp_path: Path, number: signal.Signals) -> None:
    rank = waiting_rank(tmp_path / "store", 0.2)
    rank.send_signal(number)
    output, errors = rank.communicate(timeout=60)
    assert (rank.returncode, output) == (ExitCode.STOPPED, "")
    assert errors == f"stopped: {number.name} received before all ranks had started; nothing was trained\n"


def test_it_keeps_the_request_if_the_others_come(tmp_path: Path) -> None:
    rank = waiting_rank(tmp_path / "store", 60)
    rank.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    subprocess.run([sys.executable, "-c", OTHERS, tmp_path / "store"], check=True)
    assert rank.communicate(timeout=60) == ("pending SIGTERM\n", "")
    assert rank.returncode == 0
