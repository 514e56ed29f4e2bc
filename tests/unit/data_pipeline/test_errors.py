"""What all commands share: a terminal that cannot show a character gets it as an escape."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SAY = """
import sys
from data_pipeline.errors import ConfigError, run_command

def main(words):
    print("\\xe9 \\u4e2d \\udce9")
    raise ConfigError("\\u4e2d")

sys.exit(run_command(main, []))
"""


_CRASH = """
import sys
from data_pipeline.errors import run_command

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
