"""What all commands share: a terminal that cannot show a character gets it as an escape."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.command_line import run_command
from common.errors import ExitCode, NextStart

ROOT = Path(__file__).resolve().parents[3]
_SAY = """
import sys
from common.errors import ConfigError
from common.command_line import run_command

def main(words):
    print("\\xe9 \\u4e2d \\udce9")
    raise ConfigError("\\u4e2d")

sys.exit(run_command(main, []))
"""


_CRASH = """
import sys
from common.command_line import run_command

def main(words):
    raise RuntimeError("https://me:hunter2@host/x?token=hunter3")

sys.exit(run_command(main, []))
"""


def test_a_traceback_holds_no_secrets_of_addresses() -> None:
    done = subprocess.run([sys.executable, "-c", _CRASH], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("RuntimeError: https://host/x\n")
    assert "hunter" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "utf-8"}, "é 中 \\udce9\n".encode()),
        ({"PYTHONIOENCODING": "latin-1"}, b"\xe9 \\u4e2d \\udce9\n"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, b"\\xe9 \\u4e2d \\udce9\n"),
    ],
)
def test_what_a_terminal_cannot_show_is_an_escape_and_no_error(environment: dict[str, str], shown: bytes) -> None:
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    done = subprocess.run([sys.executable, "-c", _SAY], cwd=ROOT, env=plain | environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, shown), done.stderr


ENDS_AT_ONCE = """
import atexit, sys, threading, time
from common.command_line import end_at_once

class Witness:
    def __del__(self):
        print("torn down", file=sys.__stdout__)

witness = Witness()
atexit.register(print, "at exit")
print("last line", end=" ")
if "thread" in sys.argv:
    threading.Thread(target=lambda: (time.sleep(0.5), print("thread done"))).start()
end_at_once(7)
"""


@pytest.mark.parametrize(
    ("word", "said"),
    [("", "last line at exit\n"), ("thread", "last line thread done\nat exit\n")],
    ids=["alone", "a thread"],
)
def test_a_process_that_ends_at_once_waits_for_threads_and_flushes_and_tidies_but_is_not_torn_down(word: str, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, word], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, said, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(("code", "expected"), [(0, ExitCode.STORAGE), (75, ExitCode.STOPPED)])
def test_a_last_line_that_cannot_be_written_is_an_error_of_a_process_that_would_have_been_done(
    code: int, expected: ExitCode
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    text = f"from common.command_line import end_at_once; print('last line'); end_at_once({code})"
    with Path("/dev/full").open("w") as full:
        assert (
            subprocess.run([sys.executable, "-c", text], cwd=ROOT, env=variables, stdout=full, check=False).returncode == expected
        )


@pytest.mark.parametrize("command", [("trainer", "--help"), ("trainer", "schema")], ids=" ".join)
def test_a_command_of_the_trainer_is_not_torn_down(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Witness:\n    def __del__(self):\n        print('torn down', file=sys.__stdout__)\nwitness = Witness()\n"
    )
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "torn down" not in done.stdout


def test_what_a_command_returns_is_its_exit_code() -> None:
    assert run_command(lambda _: ExitCode.GUARD, []) == ExitCode.GUARD
    assert run_command(lambda _: None, []) == ExitCode.DONE


def test_the_pages_name_the_codes_after_which_another_start_may_succeed_and_those_after_which_it_is_useless() -> None:
    may_succeed, useless = (
        [int(code) for code in ExitCode if code.next_start is one] for one in (NextStart.MAY_SUCCEED, NextStart.USELESS)
    )
    cluster, training = ((ROOT / f"docs/{page}.md").read_text(encoding="utf-8") for page in ("cluster", "training"))
    heads = [re.findall(r"\b\d+\b", head) for head in re.findall(r"after exit code ([\d, or]+)", cluster)]
    assert [[int(code) for code in head] for head in heads] == [[ExitCode.STOPPED], may_succeed, useless]
    (restarted,) = re.findall(r"Only exit codes ([\d and]+) ", training)
    assert [int(code) for code in re.findall(r"\d+", restarted)] == may_succeed


def test_a_module_that_is_missing_in_the_middle_of_a_command_is_an_error_of_the_installation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loads(_: Sequence[str]) -> None:
        importlib.import_module("no_such_module")

    assert run_command(loads, []) == ExitCode.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: a module cannot be loaded: ModuleNotFoundError: No module named 'no_such_module' (")
