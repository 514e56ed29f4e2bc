"""The two commands of docs/containers.md that need no Compose."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.containers.services import IMAGE, PROJECT, ROOT, Services

pytestmark = pytest.mark.containers

VOLUME = f"{PROJECT}-plain"


def commands() -> list[str]:
    section = (ROOT / "docs/containers.md").read_text().partition("## Without Compose\n")[2]
    return re.findall("```sh\n(.*?)```", section, re.DOTALL)[0].splitlines()


def test_the_image_prepares_and_trains_with_plain_docker_commands(services: Services, tmp_path: Path) -> None:
    """Here on the pages of `docs/`, with the small recipe, in another volume, and without a GPU."""
    tmp_path.chmod(0o755)
    shutil.copytree(ROOT / "docs", tmp_path / "text", ignore=lambda _, names: [name for name in names if not name.endswith(".md")])
    try:
        for command in commands():
            ours = command.replace("--gpus all ", "").replace("trainer:local", IMAGE).replace("--recipe demo", "--recipe smoke")
            ours = ours.replace("workspace:/workspace", f"{VOLUME}:/workspace").replace("$PWD", str(tmp_path))
            done = subprocess.run(shlex.split(ours), capture_output=True, text=True, timeout=400, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1].endswith("steps 60")
    finally:
        subprocess.run(["docker", "volume", "rm", "--force", VOLUME], check=False, capture_output=True, timeout=60)
