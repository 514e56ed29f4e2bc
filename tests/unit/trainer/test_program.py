"""The list of commands of the program `trainer`, and the words that it understands itself."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from common.errors import ConfigError
from data_pipeline.commands.table import COMMANDS as OF_DATA
from tests.support.runs import ROOT
from trainer.launch.command import COMMANDS as OF_TRAINER
from trainer.program import list_of_commands, run_here


def trainer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainer.program", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_list_has_every_command_of_both_packages_and_begins_with_those_that_fit_a_terminal() -> None:
    lines = list_of_commands().splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "]
    renamed = {"verify": "verify-data", "schema": "schema-data"}
    assert sorted(listed) == sorted(["completion", *OF_TRAINER, *(renamed.get(name, name) for name in OF_DATA)])
    assert listed[:3] == ["prepare", "inspect", "train"]
    assert max(map(len, lines)) <= 80
    assert lines.index("more commands:") < 24


def test_a_wrong_command_leads_to_the_right_one() -> None:
    with pytest.raises(ConfigError, match="'trian' is not a command; did you mean train"):
        run_here(["trian"])


@pytest.mark.parametrize(
    ("words", "begin"),
    [
        ((), "usage: trainer COMMAND"),
        (("help",), "usage: trainer COMMAND"),
        (("--version",), "trainer 0."),
        (("help", "verify-data"), "usage: trainer verify-data"),
        (("help", "runs"), "usage: trainer runs"),
        (("prepare", "--help"), "usage: trainer prepare"),
        (("train", "--help"), "usage: trainer train"),
    ],
)
def test_help_and_version_go_to_stdout(words: tuple[str, ...], begin: str) -> None:
    done = trainer(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(begin)


def test_ctrl_c_while_the_program_loads_is_one_line() -> None:
    slow = "import signal, time, sys, trainer.program as p; sys.argv = ['trainer', 'help']; "
    code = slow + "p.list_of_commands = lambda: (print('up', flush=True), time.sleep(60)); p.main()"
    begun = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert begun.stdout
    assert begun.stdout.readline() == "up\n"
    begun.send_signal(signal.SIGINT)
    _, error = begun.communicate(timeout=60)
    assert (begun.returncode, error) == (130, "stopped: interrupted with Ctrl-C\n")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trainer tr", ["train"]),
        ("trainer help prep", ["prepare"]),
        ("trainer train --limits.", ["--limits.steps", "--limits.epochs", "--limits.tokens", "--limits.minutes"]),
        ("trainer prepare --row", ["--row_length"]),
        ("trainer generate --promp", ["--prompt", "--prompts"]),
        ("trainer train my", []),
    ],
)
def test_bash_completes_commands_and_settings(line: str, offered: list[str]) -> None:
    script = trainer("completion", "bash").stdout
    words = line.split()
    ask = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _trainer; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == offered
    assert done.stderr == ""


def test_other_shells_have_a_script_with_every_setting() -> None:
    for shell, spelled in (("zsh", "--limits.steps"), ("fish", "-l limits.steps")):
        script = trainer("completion", shell).stdout
        assert spelled in script
        assert "verify-data" in script


def test_completion_has_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["completion", "--help"], ["completion", "-h"]):
        run_here(words)
        shown = capsys.readouterr().out
        assert shown.startswith("usage: trainer completion bash|zsh|fish\n")
        assert "source <(trainer completion bash)" in shown


def test_completion_for_another_shell_is_an_error_that_names_those_there_are() -> None:
    for words in (["completion"], ["completion", "tcsh"], ["completion", "bash", "zsh"]):
        with pytest.raises(ConfigError, match="bash, zsh, fish"):
            run_here(words)
