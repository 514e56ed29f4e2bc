"""Runs the programs that describe a machine: docker and nvidia-smi. It imports the standard library alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Output:
    code: int | None  # None if the program is missing or did not end in time
    text: str  # what it printed on stdout, without white space around it
    error: str = ""  # What it printed on stderr, in one line; or why it has no exit code. Empty if the program is missing.

    @property
    def is_missing(self) -> bool:
        return self.code is None and not self.error


Runner: TypeAlias = Callable[[Sequence[str]], Output]  # runs a command; tests replace it


def run_program(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> Output:
    """Run a program of the search path, without input and in English, and return its output. It never raises for a program."""
    if shutil.which(command[0]) is None:
        return Output(None, "")
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return Output(None, "", f"{command[0]} did not answer within {timeout_s:g} s")
    except OSError as error:
        return Output(None, "", f"{command[0]} cannot be started: {error.strerror or error}")
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    return Output(done.returncode, out.strip(), " ".join(err.split()))
