"""The two commands of docs/containers.md that need no Compose."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.services import PROJECT, ROOT, Services

pytestmark = pytest.mark.containers

VOLUME = f"{PROJECT}-plain"


def commands() -> list[str]:
    section = (ROOT / "docs/containers.md").read_text().partition("## Without Compose\n")[2]
    return re.findall("```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()


def docker(*arguments: str) -> str:
    """Return what docker prints; empty if it fails."""
    return subprocess.run(["docker", *arguments], check=False, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def local(services: Services, tmp_path: Path) -> Iterator[None]:
    """The image as `make image` names it without IMAGE, and afterwards the image that had this name."""
    before = docker("image", "inspect", "--format", "{{.Id}}", "trainer:local")
    variables = {name: value for name, value in services.variables.items() if name != "IMAGE"}
    variables |= {"ENV_FILE": str(tmp_path / "env"), "COMPOSE_PROJECT_NAME": VOLUME}
    subprocess.run([ROOT / "env/up", "--env"], env=variables, check=True, capture_output=True, timeout=600)
    yield
    docker("image", "rm", f"trainer:{VOLUME}", "trainer:local")
    if before:
        docker("tag", before, "trainer:local")


@pytest.mark.usefixtures("local")
def test_the_image_prepares_and_trains_with_plain_docker_commands(tmp_path: Path) -> None:
    """Here on the pages of `docs/`, with the small recipe, in another volume, and without a GPU."""
    tmp_path.chmod(0o755)
    shutil.copytree(ROOT / "docs", tmp_path / "text", ignore=lambda _, names: [name for name in names if not name.endswith(".md")])
    try:
        for command in commands():
            assert " trainer:local " in command
            ours = command.replace("--gpus all ", "").replace("--recipe demo", "--recipe smoke")
            ours = ours.replace("workspace:/workspace", f"{VOLUME}:/workspace").replace("$PWD", str(tmp_path))
            done = subprocess.run(shlex.split(ours), capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1].endswith("steps 60")
    finally:
        docker("volume", "rm", "--force", VOLUME)
