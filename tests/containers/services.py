"""Helpers for tests of running services: Compose commands, files on the volume, and answers of TensorBoard."""

from __future__ import annotations

import hashlib
import json
import shutil
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
"""Name of the image. It is specific to this checkout, so tests of two checkouts do not disturb each other."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class Services:
    """The Compose project under test: its file of settings, and the variables that a user would set in the shell."""

    env_file: Path
    variables: dict[str, str]
    checkout: Path = ROOT

    def with_variables(self, **variables: str) -> Services:
        return replace(self, variables={**self.variables, **variables})

    def compose(
        self, *arguments: str, stdin: str = "", timeout_s: float = 300, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS`. A failure shows the output of Compose."""
        command = ["docker", "compose", "--env-file", str(self.env_file), "--progress", "quiet", *arguments]
        result = subprocess.run(
            command,
            cwd=self.checkout,
            env={**self.variables, "PWD": str(self.checkout)},  # as a shell sets it; Compose derives the project name from it
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
        """Return the output of `code` in a new container of the service, with the settings of that service."""
        command = ("run", "--rm", "--no-deps", "-T", *options, "--entrypoint", "python", service, "-")
        return self.compose(*command, stdin=code).stdout

    def inspect(self, service: str) -> dict[str, Any]:
        """Return the engine's record of the container of a service, running or ended."""
        container = self.compose("ps", "--all", "--quiet", service).stdout.strip()
        (record,) = json.loads(subprocess.run(["docker", "inspect", container], check=True, capture_output=True, text=True).stdout)
        return dict(record)

    def wait(self, service: str, timeout_s: float = 600) -> int:
        """Wait until a service has ended, and return its exit code."""
        container = self.inspect(service)["Id"]
        command = ["docker", "wait", container]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=timeout_s).stdout)

    def read(self, path: str) -> str:
        """Return a file of the volume, read through the tensorboard service. Empty if it does not exist yet."""
        return self.compose("exec", "-T", "tensorboard", "cat", path, check=False).stdout

    def metrics(self, run: str, event: str = "train") -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl of a run that hold this kind of event."""
        lines = self.read(f"/workspace/runs/{run}/metrics.jsonl").split("\n")[:-1]
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def losses(self, run: str) -> list[tuple[int, str]]:
        """Return the step and the loss, in hexadecimal digits, of each step of a run."""
        return [(line["step"], line["loss_hex"]) for line in self.metrics(run)]

    def tensorboard(self, path: str) -> Any:
        """Return the JSON answer of TensorBoard's data API on the published port."""
        url = f"http://127.0.0.1:{self.variables['TENSORBOARD_PORT']}{path}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)


def eventually(condition: Callable[[], Value], timeout_s: float, what: str) -> Value:
    """Return the first true value of `condition()`. Fails after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.3)
    pytest.fail(f"timed out after {timeout_s:g} s: {what}")


def copy_compose_files(folder: Path) -> None:
    """Copy what `docker compose` reads of a checkout."""
    for name in ("docker-compose.yml", "docker-compose.gpus.yml", "docker-compose.tools.yml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "env" / "settings", folder / "env" / "settings")
    (folder / "extensions").mkdir()
