"""The ranks of a single node, which are small scripts here: their variables, stop requests, and the exit code of the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ExitCode
from tests.support.runs import ROOT
from trainer.launch.ranks import is_alone
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

_LAUNCH = """
import sys
from common.command_line import end_at_once
from trainer.launch.ranks import launch_here
assert "torch" not in sys.modules
end_at_once(launch_here(["-c", sys.argv[1]], int(sys.argv[2]), float(sys.argv[3])))
"""
_RANK = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def wait_for_term():
    signal.sigwait({signal.SIGTERM})  # it is blocked when a rank starts
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def begun(rank: str, tmp_path: Path, num_ranks: int = 2, shutdown_s: float = 60) -> subprocess.Popen[str]:
    (tmp_path / "exit").touch()
    return subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, _RANK + rank, str(num_ranks), str(shutdown_s)],
        cwd=ROOT,
        env=os.environ | {EXIT_FILE_VARIABLE: str(tmp_path / "exit")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(rank: str, tmp_path: Path, num_ranks: int = 2, shutdown_s: float = 60) -> tuple[int, list[str], str]:
    with begun(rank, tmp_path, num_ranks, shutdown_s) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, sorted(out.splitlines()), err


def test_each_rank_knows_its_number_and_no_signal_is_ignored_in_it(tmp_path: Path) -> None:
    code, lines, err = ended(
        "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')\n"
        "ignored = [n for n in (1, 2, 3, 13, 15, 25) if signal.getsignal(n) == signal.SIG_IGN and n not in (13, 25)]\n"
        "say(*(os.environ[n] for n in names), os.getsid(0) == os.getpid(), os.path.isdir(os.environ['TRAINER_STORE']), ignored)\n"
        "say('blocked', *sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))",
        tmp_path,
    )
    assert (code, err) == (ExitCode.DONE, "")
    assert lines == ["0 0 2 2 True True []", "1 1 2 2 True True []", *["blocked 2 15"] * 2]
    assert list(tmp_path.iterdir()) == [tmp_path / "exit"], "the folder of the ranks is removed"


def test_the_code_of_the_rank_that_fails_first_is_that_of_the_group_and_the_others_are_asked_to_stop(tmp_path: Path) -> None:
    code, lines, err = ended("wait_for_term() if rank else sys.exit(3)\nsay('asked', rank); sys.exit(4)", tmp_path)
    assert (code, lines, err) == (3, ["asked 1"], "")


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        ("os.kill(os.getpid(), 9)", "error: signal 9 (SIGKILL) ended rank 0 (process "),
        ("os._exit(134)", "error: rank 0 (process "),
        ("os._exit(1)", ""),
    ],
)
def test_a_rank_that_gives_no_reason_is_a_crash(rank: str, said: str, tmp_path: Path) -> None:
    code, _, err = ended(rank, tmp_path, num_ranks=1)
    assert (code, err.startswith(said), bool(err)) == (ExitCode.CRASHED, True, bool(said))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_stop_signal_reaches_all_ranks_as_sigterm_and_their_save_is_waited_for(number: signal.Signals, tmp_path: Path) -> None:
    rank = "say('ready'); wait_for_term(); time.sleep(0.3); say('saved', rank); sys.exit(75)"
    with begun(rank, tmp_path) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, sorted(out.splitlines()), err) == (ExitCode.STOPPED, ["saved 0", "saved 1"], "")


_OTHER_THREAD = """
import os, signal, sys, threading, time
def strike():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=strike, daemon=True).start()
"""


def test_a_stop_signal_that_a_thread_of_numpy_or_torch_gets_is_a_stop_request_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "_LAUNCH", _OTHER_THREAD + _LAUNCH)
    with begun("say('ready'); wait_for_term(); say('saved', rank); sys.exit(75)", tmp_path) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        out, err = process.communicate("now\n", timeout=60)
    assert (process.returncode, sorted(out.splitlines()), err) == (ExitCode.STOPPED, ["saved 0", "saved 1"], "")


def test_ranks_that_do_not_stop_are_killed(tmp_path: Path) -> None:
    with begun("say('ready'); time.sleep(60)", tmp_path, shutdown_s=0.5) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.CRASHED
    assert time.monotonic() - began >= 0.5
    assert err.startswith("error: signal 9 (SIGKILL) ended rank")


def test_no_rank_is_started_after_a_stop_request(tmp_path: Path) -> None:
    blocked = f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{15}}); os.kill(os.getpid(), 15)\n{_LAUNCH}"
    done = subprocess.run(
        [sys.executable, "-c", blocked, f"open({str(tmp_path / 'started')!r}, 'w')", "1", "1"],
        cwd=ROOT,
        env=os.environ | {EXIT_FILE_VARIABLE: str(tmp_path / "exit")},
        check=False,
        timeout=60,
    )
    assert (done.returncode, list(tmp_path.iterdir())) == (ExitCode.STOPPED, [])


@pytest.mark.parametrize(
    ("variables", "words", "alone"),
    [
        ({}, ["-m", "trainer", "train", "--run", "a"], True),
        ({"PET_NNODES": "1", "PET_MASTER_ADDR": "a", "PET_SHUTDOWN_TIMEOUT": "5"}, ["-m", "trainer", "train"], True),
        ({"PET_MAX_RESTARTS": ""}, ["-m", "trainer", "train"], True),
        ({"PET_NNODES": "2"}, ["-m", "trainer", "train"], False),
        ({"PET_NNODES": "1:2"}, ["-m", "trainer", "train"], False),
        ({"PET_NPROC_PER_NODE": "auto"}, ["-m", "trainer", "train"], False),
        ({"PET_MAX_RESTARTS": "1"}, ["-m", "trainer", "train"], False),
        ({"PET_LOG_DIR": "a"}, ["-m", "trainer", "train"], False),
        ({}, ["--nproc-per-node", "2", "-m", "--", "trainer", "train"], False),
        ({}, ["-m", "other", "train"], False),
    ],
)
def test_torchrun_starts_the_ranks_of_several_nodes_and_obeys_its_other_settings(
    variables: dict[str, str], words: list[str], alone: bool
) -> None:
    assert is_alone(words, {"PET_NPROC_PER_NODE": "1"} | variables) is alone
