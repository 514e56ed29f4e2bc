"""A machine with GPUs that torch does not see: real processes, with a separate /dev that contains a device node."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, arguments, tiny_config
from trainer.loop import train

WITH_A_NODE = """
set -euo pipefail
mount -t tmpfs tmpfs "$0"
for name in null zero full random urandom; do touch "$0/$name"; mount --bind "/dev/$name" "$0/$name"; done
mkdir "$0/shm"
mknod "$0/nvidia0" c 195 0 2>/dev/null || touch "$0/nvidia0"
mount --rbind "$0" /dev
exec "$@"
"""
"""Runs a command with the device node of a GPU in /dev. $0 is an empty folder. The mounts end with the command."""

OWN_MOUNTS = ["unshare", "--mount", *(["--map-root-user"] if os.getuid() else [])]
LAUNCHERS = "PET_", "SLURM_", "SKYPILOT_", "TRAIN", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"


@cache
def may_mount() -> bool:
    try:
        return (
            subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False).returncode == 0
        )
    except OSError:
        return False


pytestmark = [
    pytest.mark.skipif(not may_mount(), reason="needs private mounts, which this machine forbids"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="torch finds a GPU"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture
def on_a_gpu_machine(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command as on a machine with a GPU."""
    (tmp_path / "dev").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}

    def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*OWN_MOUNTS, "bash", "-c", WITH_A_NODE, tmp_path / "dev", *command],
            cwd=ROOT,
            env=kept | {"PYTHON": sys.executable, "CPU_RANKS": "1", "OMP_NUM_THREADS": "1"} | environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def test_training_and_looking_at_a_run_are_refused_with_torchs_reason(
    data: Path, tmp_path: Path, on_a_gpu_machine: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    config = tiny_config(data, tmp_path / "run", device="auto", limits={"steps": 2})
    for command in ((ROOT / "entrypoints/train",), (sys.executable, "-m", "trainer", "train")):
        refused = on_a_gpu_machine(*command, *arguments(config))
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.splitlines()[-1].startswith(
            "error: this machine has a GPU (/dev/nvidia0), but torch sees none: this PyTorch ("
        )
        assert refused.stderr.count("error: ") == 1
    assert not config.run.exists()
    train(config)
    refused = on_a_gpu_machine(sys.executable, "-m", "trainer", "generate", config.run, "--max_tokens", "1")
    assert refused.returncode == 2, refused.stderr
    assert "this machine has a GPU (/dev/nvidia0), but torch sees none: this PyTorch (" in refused.stderr


def test_a_training_that_is_to_use_the_cpu_does(
    data: Path, tmp_path: Path, on_a_gpu_machine: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    given = arguments(tiny_config(data, tmp_path / "run", device="cpu", limits={"steps": 2}))
    done = on_a_gpu_machine(ROOT / "entrypoints/train", *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(" steps 2")
