"""A wrong setting is refused before torch is loaded: by every command, by the launcher's processes, and by a rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from data_pipeline.commands.table import COMMANDS as OF_DATA
from tests.support.runs import ROOT
from trainer.launch.command import COMMANDS as OF_TRAINER

HEAVY = {"torch", "numpy", "pyarrow", "sentencepiece"}
_TRAIN = ("--data", "d", "--run", "r", "--limits.steps")


def refused(module: str, *commands: Sequence[str]) -> list[str]:
    """Call `main` of a module once with the words of each command. Return what it printed; nothing heavy may be loaded."""
    code = (
        "import importlib, json, sys\n"
        "from common.command_line import run_command\n"
        f"main = importlib.import_module({module!r}).main\n"
        f"assert [run_command(main, words) for words in json.loads(sys.argv[1])] == [2] * {len(commands)}\n"
        f"heavy = {HEAVY} & set(sys.modules); assert not heavy, heavy"
    )
    words = str([list(words) for words in commands]).replace("'", '"')
    done = subprocess.run([sys.executable, "-c", code, words], cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 0, lines[-3:]
    return lines


@pytest.mark.parametrize(
    ("module", "names"), [("trainer.__main__", sorted(OF_TRAINER)), ("data_pipeline.__main__", sorted(OF_DATA))]
)
def test_an_unknown_option_of_every_command_is_refused_before_anything_heavy_is_loaded(module: str, names: list[str]) -> None:
    lines = refused(module, *((name, "--no_option", "1") for name in names))
    assert len(lines) == len(names)
    assert all(f"{name}: " in line for name, line in zip(names, lines, strict=True))


def test_a_wrong_value_is_refused_before_anything_heavy_is_loaded() -> None:
    lines = refused(
        "trainer.__main__",
        ["train", *_TRAIN, "x"],
        ["train", *_TRAIN, "5", "--model.heads", "5"],
        ["evaluate", "r", "--limit", "x"],
        ["verify", "r", "--level", "x"],
    )
    assert [line.partition(" = ")[0] for line in lines] == [
        "error: limits.steps",
        "error: model.width",
        "error: --limit",
        "error: --level",
    ]


def test_torchrun_is_not_started_with_a_wrong_setting() -> None:
    [line] = refused("trainer.launch.torchrun", ["--nnodes=1", "-m", "trainer", "train", *_TRAIN, "x"])
    assert line.startswith("error: limits.steps = 'x'")
