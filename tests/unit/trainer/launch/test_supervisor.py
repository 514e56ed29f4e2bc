"""When a group of ranks is started again, and with which exit code the launcher ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, ExitCode, NextStart
from tests.support.signal_handlers import installed_request
from trainer.launch import supervisor
from trainer.launch.stop_request import StopRequest
from trainer.launch.supervisor import Ended, RestartPolicy, ended, newest_step, run_group, supervise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="starts processes as Linux does")


@pytest.fixture
def pauses() -> list[float]:
    """Of `stop`, in seconds."""
    return []


@pytest.fixture
def stop(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> StopRequest:
    """A request that never comes, unless a test makes it; its pauses take no time."""
    monkeypatch.setattr(StopRequest, "pause", lambda _self, seconds: pauses.append(seconds))
    return StopRequest()


def request(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "is_received", lambda: True)


class Groups:
    """Groups that end one after the other; the last end repeats itself. Each may save a checkpoint before."""

    def __init__(self, *ends: Ended, steps: tuple[int, ...] = ()) -> None:
        self._ends, self._steps, self.num_started = ends, steps, 0

    def run(self) -> Ended:
        self.num_started += 1
        return self._ends[min(self.num_started, len(self._ends)) - 1]

    def newest(self) -> int:
        return max((-1, *self._steps[: self.num_started]))


CRASH = Ended(137)


MAY_SUCCEED = [code for code in ExitCode if code.next_start is NextStart.MAY_SUCCEED]


@pytest.mark.parametrize("code", sorted({*ExitCode} - {*MAY_SUCCEED}))
def test_a_reason_that_stays_is_the_exit_code_at_once(code: ExitCode, stop: StopRequest) -> None:
    groups = Groups(Ended(code))
    assert supervise(groups.run, RestartPolicy(3, 5), groups.newest, stop) == code
    assert groups.num_started == 1


@pytest.mark.parametrize("code", [*MAY_SUCCEED, 137, 139, 255])
def test_a_group_that_crashes_is_started_again(code: int, stop: StopRequest, capfd: pytest.CaptureFixture[str]) -> None:
    groups = Groups(Ended(code), Ended(0))
    assert supervise(groups.run, RestartPolicy(3, 5), groups.newest, stop) == ExitCode.DONE
    assert capfd.readouterr().err == (
        f"train: the ranks ended (code {code}); starting again from the newest checkpoint in 5 s "
        "(restart 1 of 3 without a new one)\n"
    )


def test_the_words_of_a_rank_are_shown_and_steer_no_terminal(stop: StopRequest, capfd: pytest.CaptureFixture[str]) -> None:
    groups = Groups(Ended(1, "rank 1 is stuck \x1b[2J"), Ended(0))
    supervise(groups.run, RestartPolicy(1, 0), groups.newest, stop, unseen=", it seems")
    assert capfd.readouterr().err == (
        "train: the ranks ended (rank 1 is stuck ⟨U+001B⟩[2J); starting again from the newest checkpoint in 0 s "
        "(restart 1 of 1 without a new one, it seems)\n"
    )


def test_pauses_double_up_to_64_times_the_first(stop: StopRequest, pauses: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    groups = Groups(CRASH)
    assert supervise(groups.run, RestartPolicy(9, 5), groups.newest, stop) == ExitCode.CRASHED
    assert pauses == [5, 10, 20, 40, 80, 160, 320, 320, 320]
    assert groups.num_started == 9 + 1
    assert capfd.readouterr().err.splitlines()[-1] == "train: not started again: 9 restarts have made no new checkpoint"


def test_a_new_checkpoint_gives_all_restarts_back_and_the_first_pause(stop: StopRequest, pauses: list[float]) -> None:
    groups = Groups(CRASH, steps=(10, 10, 20))
    assert supervise(groups.run, RestartPolicy(2, 5), groups.newest, stop) == ExitCode.CRASHED
    assert pauses == [5, 10, 5, 10]


def test_without_restarts_nothing_is_said_about_them(stop: StopRequest, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(Groups(CRASH).run, RestartPolicy(0, 5), lambda: -1, stop) == ExitCode.CRASHED
    assert capfd.readouterr().err == ""


def test_nothing_is_started_after_a_request_to_stop(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request(stop, monkeypatch)
    groups = Groups(CRASH)
    assert supervise(groups.run, RestartPolicy(3, 5), groups.newest, stop) == ExitCode.STOPPED
    assert groups.num_started == 0


def test_a_group_that_crashes_when_it_is_to_stop_is_a_crash_and_is_not_started_again(
    stop: StopRequest, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    groups = Groups(CRASH)

    def run() -> Ended:
        request(stop, monkeypatch)
        return groups.run()

    assert supervise(run, RestartPolicy(3, 5), groups.newest, stop) == ExitCode.CRASHED
    assert (groups.num_started, capfd.readouterr().err) == (1, "")


def test_a_request_in_the_pause_starts_nothing_more(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "pause", lambda _: request(stop, monkeypatch))
    groups = Groups(CRASH)
    assert supervise(groups.run, RestartPolicy(3, 5), groups.newest, stop) == ExitCode.STOPPED
    assert groups.num_started == 1


@pytest.mark.parametrize(
    ("status", "left", "expected"),
    [
        (0, "", Ended(0)),
        (0, "75\n", Ended(0)),
        (1, "", Ended(1)),
        (1, "3\n", Ended(3)),
        (1, "1 rank 1 has stood still\nmore\n", Ended(1, "rank 1 has stood still")),
        (-9, "", Ended(137)),
        (-9, "74\n", Ended(74)),
        (137, "\n", Ended(137)),
        (1, "no code", Ended(1)),
        *((-number, "", Ended(75)) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)),
        (143, "", Ended(75)),
        (-15, "1 a rank was killed", Ended(1, "a rank was killed")),
    ],
)
def test_the_end_is_what_a_rank_has_left_or_else_the_end_of_torchrun(status: int, left: str, expected: Ended) -> None:
    assert ended(status, left) == expected


def test_a_group_that_the_kernel_kills_for_lack_of_memory_ends_with_this_reason(
    installed: StopRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stand-in for the cgroup counts one kill while the group runs."""
    counts = iter((2, 3))
    monkeypatch.setattr(supervisor, "num_oom_kills", lambda: next(counts))
    monkeypatch.setattr(supervisor, "why_killed", lambda before: "the memory limit is used up" if next(counts) > before else "")
    assert run_group(["bash", "-c", "kill -9 $$"], tmp_path / "exit", installed) == Ended(137, "the memory limit is used up")
    said = "train: signal 9 (SIGKILL) ended the process that starts the ranks: the memory limit is used up\n"
    assert capfd.readouterr().err == said


def test_restarts_are_three_on_one_node_and_left_to_the_scheduler_on_several() -> None:
    assert RestartPolicy.of({}, "1") == RestartPolicy(3, 5)
    assert RestartPolicy.of({"TRAIN_MAX_RESTARTS": ""}, "2") == RestartPolicy(0, 5)
    assert RestartPolicy.of({"TRAIN_MAX_RESTARTS": "007", "TRAIN_RESTART_DELAY_S": "0"}, "2") == RestartPolicy(7, 0)


@pytest.mark.parametrize("value", ["many", "-1", "1.5", "1000000", "٢", " 1"])
@pytest.mark.parametrize("name", ["TRAIN_MAX_RESTARTS", "TRAIN_RESTART_DELAY_S"])
def test_a_number_that_cannot_be_meant_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = {value}( and .*)? must be integers from 0 to 999999"):
        RestartPolicy.of({name: value}, "1")


def test_the_newest_checkpoint_is_found_by_its_number(tmp_path: Path) -> None:
    assert newest_step("") == newest_step(str(tmp_path)) == -1
    folder = tmp_path / "checkpoints"
    for name in ("step-99999999", "step-100000000", "step-200000000.tmp", ".step-300000000", "objects"):
        (folder / name).mkdir(parents=True)
    assert newest_step(str(tmp_path)) == 100_000_000


@pytest.fixture
def installed() -> Iterator[StopRequest]:
    with installed_request() as stop:
        yield stop


def test_a_group_is_run_in_a_session_of_its_own_without_input(
    installed: StopRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    does = 'echo "$(ps -o sid= -p $$) $$ $(readlink /proc/$$/fd/0)" >$OUT; exit 7'
    kept, terminal = os.dup(0), os.open(tmp_path, os.O_RDONLY)
    os.dup2(terminal, 0)
    try:
        assert run_group(["bash", "-c", does], tmp_path / "exit", installed) == Ended(7)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(terminal)
    session, own, stdin = (tmp_path / "out").read_text().split()
    assert (session, stdin) == (own, os.devnull)


def test_the_reason_of_an_earlier_group_is_forgotten(installed: StopRequest, tmp_path: Path) -> None:
    (tmp_path / "exit").write_text("3\n")
    assert run_group(["bash", "-c", "exit 1"], tmp_path / "exit", installed) == Ended(1)


def test_a_reason_that_was_removed_is_no_error(installed: StopRequest, tmp_path: Path) -> None:
    assert run_group(["rm", tmp_path / "exit"], tmp_path / "exit", installed) == Ended(0)


def test_the_orphans_of_others_are_reaped_and_their_end_is_not_that_of_the_group(installed: StopRequest, tmp_path: Path) -> None:
    orphan = os.posix_spawnp("bash", ["bash", "-c", "exit 5"], os.environ)
    assert run_group(["bash", "-c", "sleep 0.5; exit 7"], tmp_path / "exit", installed) == Ended(7)
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)
