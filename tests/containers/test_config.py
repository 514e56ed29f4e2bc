"""The services as `docker compose config` prints them for the settings of a user. No engine is needed, but the program docker is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.conftest import OWN_VARIABLES
from tests.containers.services import ROOT

MIG = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return bool(shutil.which("docker")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_compose(), reason="Docker Compose is not installed")


def compose(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose ARGUMENTS` in this checkout, without the settings of its .env."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    return subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", *arguments],
        cwd=ROOT,
        env={**inherited, "PWD": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def config(*options: str, **variables: str) -> dict[str, Any]:
    """Return what Compose makes of the files. A failure or a warning shows the output of Compose."""
    result = compose(*options, "config", **variables)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    return dict(yaml.safe_load(result.stdout))


def service(name: str, **variables: str) -> dict[str, Any]:
    """Return a service as Compose would start it."""
    return dict(config(**variables)["services"][name])


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, {"count": -1}),
        ({"GPUS": "all"}, {"count": -1}),
        ({"GPUS": "2"}, {"count": 2}),
        ({"GPUS": "16"}, {"count": 16}),
        ({"GPU_IDS": "3"}, {"device_ids": ["3"]}),
        ({"GPU_IDS": "0,3"}, {"device_ids": ["0,3"]}),
        ({"GPU_IDS": "0,3", "GPUS": "all"}, {"device_ids": ["0,3"]}),
        ({"GPU_IDS": MIG}, {"device_ids": [MIG]}),
    ],
)
def test_a_variable_says_which_gpus_train_gets(variables: Mapping[str, str], devices: dict[str, object]) -> None:
    """A count of -1 is all GPUs. The engine joins ids with commas, so one text may hold several."""
    train = service("train", **variables)
    (found,) = train["deploy"]["resources"]["reservations"]["devices"]
    assert found == {"driver": "nvidia", "capabilities": ["gpu"], **devices}
    assert "TRAIN_SEED" in train["environment"]
    assert "NVIDIA_VISIBLE_DEVICES" not in train["environment"]


def test_without_gpus_none_are_asked_for_and_none_are_seen() -> None:
    train = service("train", GPUS="none")
    assert "devices" not in str(train.get("deploy", {}))
    assert train["environment"]["NVIDIA_VISIBLE_DEVICES"] == "none"


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"GPUS": "0"}, "gpus-0"),
        ({"GPUS": "0,3"}, "gpus-0,3"),
        ({"GPUS": "some"}, "gpus-some"),
        ({"GPU_IDS": "0,3", "GPUS": "none"}, "gpus-chosen-none"),
        ({"GPU_IDS": "0,3", "GPUS": "2"}, "gpus-chosen-2"),
    ],
)
def test_gpus_that_cannot_be_meant_are_refused_in_one_line(variables: Mapping[str, str], missing: str) -> None:
    result = compose("config", **variables)
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1
    assert f'service "{missing}" not found in docker-compose.gpus.yml' in result.stderr
