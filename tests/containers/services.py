"""What the tests of running services are written in: Compose commands, files on the volume, TensorBoard's answers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CHECKOUT = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]
PROJECT = f"trainer-smoke-{_CHECKOUT}"
IMAGE = f"trainer:smoke-{_CHECKOUT}"
"""Of this checkout alone, so that the tests of two do not disturb each other."""
Value = TypeVar("Value")

__all__ = ["IMAGE", "PROJECT", "ROOT", "Services", "eventually"]


@dataclass(frozen=True)
class Services:
    """The compose project under test: its file of settings and the variables that a user would set in the shell."""

    env_file: Path
    variables: dict[str, str]
    checkout: Path = ROOT

    def with_variables(self, **variables: str) -> Services:
        return replace(self, variables={**self.variables, **variables})

    def compose(
        self, *arguments: str, stdin: str = "", timeout_s: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs `docker compose ARGUMENTS`; a failure shows what Compose said."""
        command = ["docker", "compose", "--env-file", str(self.env_file), "--progress", "quiet", *arguments]
        result = subprocess.run(
            command,
            cwd=self.checkout,
            env={**self.variables, "PWD": str(self.checkout)},  # as a shell has it; Compose names the project by it
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and result.returncode:
            pytest.fail(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}")
        return result

    def python(self, service: str, code: str, *options: str) -> str:
        """What `code` prints in a new container of the service, which has that service's own settings."""
        command = ("run", "--rm", "--no-deps", "-T", *options, "--entrypoint", "python", service, "-")
        return self.compose(*command, stdin=code).stdout

    def inspect(self, service: str) -> dict[str, Any]:
        """The engine's record of the service's container, running or ended."""
        container = self.compose("ps", "--all", "--quiet", service).stdout.strip()
        (record,) = json.loads(subprocess.run(["docker", "inspect", container], check=True, capture_output=True, text=True).stdout)
        return dict(record)

    def wait(self, service: str, timeout_s: float = 600) -> int:
        """The exit code of the service, once it has ended."""
        container = self.inspect(service)["Id"]
        command = ["docker", "wait", container]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout)

    def read(self, path: str) -> str:
        """A file on the volume, read through the tensorboard service; empty if it is not there yet."""
        return self.compose("exec", "-T", "tensorboard", "cat", path, check=False).stdout

    def metrics(self, run: str, event: str = "train") -> list[dict[str, Any]]:
        """The complete lines of a run's metrics.jsonl that are of one kind."""
        lines = self.read(f"/workspace/runs/{run}/metrics.jsonl").split("\n")[:-1]
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def tensorboard(self, path: str) -> Any:
        """The JSON answer of TensorBoard's data API on the published port."""
        url = f"http://127.0.0.1:{self.variables['TENSORBOARD_PORT']}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)


def eventually(condition: Callable[[], Value], timeout_s: float, what: str) -> Value:
    """The first true value of `condition()`; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.3)
    pytest.fail(f"not within {timeout_s:g} s: {what}")
