"""What the checks read: output of programs, files of variables, versions that a training needs. Standard library alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from common.paths import ENV

_TIMEOUT_S = 20.0
_LINE = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)[ \t]*[=:](?P<value>.*)", re.DOTALL)


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


def read_variables(path: Path) -> tuple[dict[str, str], list[str]]:
    try:
        return parse_variables(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return {}, [] if isinstance(error, FileNotFoundError) else [f"it cannot be read: {error.strerror}"]


def parse_variables(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables in NAME=VALUE lines, and a text for each line that Compose refuses. The last line of a name counts."""
    found, problems, lines = {}, [], text.replace("\0", "\ufffd").splitlines()  # no path may hold the character 0
    number = 0
    while number < len(lines):
        line, place = lines[number], number + 1
        number += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if (pair := _LINE.fullmatch(line)) is None:
            problems.append(f"line {place} is not NAME=VALUE")
            continue
        name, value = pair["name"], pair["value"].strip()
        quote = value[:1]
        if quote not in ("'", '"'):
            found[name] = re.sub(r"(?:^|\s)#.*", "", value).rstrip()
            continue
        rest = "\n".join((value[1:], *lines[number:]))
        end = rest.find(quote)
        while end > 0 and rest[end - 1] == "\\":
            end = rest.find(quote, end + 1)
        if end < 0:
            problems.append(f"line {place}: the quote {quote} of {name} is not closed")
            break
        found[name] = rest[:end]
        number += found[name].count("\n")
    return found, problems


@dataclass(frozen=True)
class Needs:
    compose: str
    cuda: str  # the CUDA version of the image
    drivers: dict[str, str]  # the lowest driver, by the major version of CUDA
    versions: dict[str, str]  # the lines of versions.env: TORCH_VERSION, CUDA_VERSION, NCCL_VERSION, CUDNN_VERSION

    def driver(self, cuda: str | None = None) -> str:
        """Return the lowest driver for a CUDA version such as `13.0`, that of the image by default; empty if it is unknown."""
        return self.drivers.get((cuda or self.cuda).partition(".")[0], "")


def read_needs() -> Needs:
    versions, host = (read_variables(ENV / name)[0] for name in ("versions.env", "host.env"))
    drivers = {name.removeprefix("DRIVER_FLOOR_"): value for name, value in host.items() if name.startswith("DRIVER_FLOOR_")}
    return Needs(host.get("COMPOSE_FLOOR", ""), versions.get("CUDA_VERSION", ""), drivers, versions)


def at_least(floor: str, found: str) -> bool:
    lowest, numbers = ([int(part) for part in re.findall(r"\d+", version)[:4]] for version in (floor, found))
    return numbers >= lowest
