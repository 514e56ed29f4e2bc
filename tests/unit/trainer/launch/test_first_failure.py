"""Of ranks that end because another one has ended, none shows a traceback."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from common.command_line import run_command
from common.errors import ExitCode
from trainer.launch import first_failure
from trainer.launch.first_failure import only_first_failure

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:38045"
NCCL = "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error"


@pytest.fixture(autouse=True)
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is one of two ranks of a node; returns the file for their reason."""
    path = tmp_path / "exit"
    path.touch()
    for name, value in {"RANK": "1", "LOCAL_WORLD_SIZE": "2", "TRAINER_EXIT_FILE": str(path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(first_failure, "_num_ranks_here", lambda: 2)
    return path


def end_of(error: BaseException) -> int:
    """The exit code of a command that ends with an error."""

    def main(_: object) -> None:
        with only_first_failure():
            raise error

    return run_command(main, [], lambda line, code: pytest.fail(f"{code} was left as the reason, with {line}"))


def at_the_third_wait(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> list[float]:
    """Replace `time.sleep`, and return the list of its calls. A fourth one is a failure."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert len(waits) < 4, "it waits although nothing can come any more"
        if len(waits) == 3:
            happens()

    monkeypatch.setattr("time.sleep", sleep)
    return waits


@pytest.mark.parametrize("words", [GLOO, NCCL])
def test_a_rank_is_silent_after_another_that_has_said_why(words: str, rank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank.write_text("74\n")
    assert end_of(RuntimeError(words)) == ExitCode.STORAGE
    assert capsys.readouterr().err == ""


def test_it_waits_for_a_rank_that_is_about_to_say_why(
    rank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = at_the_third_wait(monkeypatch, lambda: rank.write_text("3 and words\n"))
    assert end_of(RuntimeError(GLOO)) == ExitCode.DATA
    assert len(waits) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("how", ["a rank has ended", "no launcher", "a code of none of the errors"])
def test_it_does_not_wait_for_words_that_cannot_come_and_says_in_one_line_what_it_saw(
    how: str, rank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    if how == "no launcher":
        monkeypatch.delenv("TRAINER_EXIT_FILE")
    if how == "a code of none of the errors":
        rank.write_text("143\n")
    monkeypatch.setattr(first_failure, "_num_ranks_here", lambda: 1)
    assert end_of(RuntimeError(GLOO)) == ExitCode.CRASHED
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 lost its connection to another rank (Connection closed by peer), which has ended; ")


def test_it_does_not_wait_if_all_ranks_of_the_node_wait_because_the_lost_one_is_on_another_node(
    rank: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.with_name(f"exit.waiting-{os.getppid() + 1}-0").touch()  # of an earlier start
    waits = at_the_third_wait(monkeypatch, rank.with_name(f"exit.waiting-{os.getppid()}-0").touch)
    assert end_of(RuntimeError(GLOO)) == ExitCode.CRASHED
    assert len(waits) == 3
    assert "rank 1 lost its connection" in capsys.readouterr().err


def test_a_rank_that_is_alone_on_its_node_waits_for_nobody(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("it waits"))
    assert end_of(RuntimeError(GLOO)) == ExitCode.CRASHED
    rank.write_text("74\n")
    assert end_of(RuntimeError(GLOO)) == ExitCode.STORAGE


def test_an_error_while_it_ends_hides_nothing_of_that(rank: Path) -> None:
    rank.write_text("5\n")
    later = RuntimeError("the group is gone")
    later.__context__ = RuntimeError(GLOO)
    assert end_of(later) == ExitCode.GUARD


@pytest.mark.parametrize("words", ["Connection closed by peer", "gloo is a dwarf", "shape mismatch"])
def test_every_other_error_keeps_its_traceback(words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        end_of(RuntimeError(words))


def test_a_process_that_is_no_rank_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    with pytest.raises(RuntimeError, match="closed by peer"):
        end_of(RuntimeError(GLOO))


@pytest.mark.parametrize("kept", [True, False])
def test_a_thread_shows_its_error_unless_it_keeps_it_for_the_one_that_uses_it(
    kept: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(threading.Thread):
        exception: BaseException | None = None

        def run(self) -> None:
            try:
                raise OSError("no space")
            except OSError as error:
                self.exception = error if kept else None
                raise

    monkeypatch.setattr(threading, "__excepthook__", lambda arguments: print(arguments.exc_value))
    with only_first_failure():
        thread = Failing()
        thread.start()
        thread.join()
    assert capsys.readouterr().out == ("" if kept else "no space\n")
