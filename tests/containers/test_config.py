"""The services as `docker compose config` prints them for the settings of a user. No engine is needed, but Docker Compose is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
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


PROFILES = [(), ("debug",), ("notebook",), ("debug", "notebook")]
CHANGES: list[dict[str, str]] = [{}, {"GPUS": "none"}, {"GPU_IDS": "0,3"}, {"WORKSPACE": "./workspace"}]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
@pytest.mark.parametrize("profiles", PROFILES, ids=str)
def test_every_combination_is_accepted_and_safe(profiles: tuple[str, ...], changes: Mapping[str, str]) -> None:
    found = config(*(word for name in profiles for word in ("--profile", name)), **changes)["services"]
    assert sorted(found) == sorted(("data-prep", "train", "tensorboard", *profiles))
    for name, one in found.items():
        assert one["cap_drop"] == ["ALL"], name
        assert one["security_opt"] == ["no-new-privileges:true"], name
        assert one["read_only"] is True, name
        assert one["init"] is True, name
        assert not {"privileged", "devices", "ipc"} & one.keys(), name
        assert all(",size=" in mount for mount in one["tmpfs"]), name
        assert all(port["host_ip"] == "127.0.0.1" for port in one.get("ports", [])), name
        assert "docker.sock" not in str(one["volumes"]), name
        if name != "debug":
            assert one["user"] == "1000:1000", name
            assert not {"cap_add", "pid", "network_mode"} & one.keys(), name
        if name not in ("data-prep", "train"):
            (workspace,) = [mount for mount in one["volumes"] if mount["target"] == "/workspace"]
            assert workspace["read_only"] is True, name


def test_debug_sees_the_processes_of_train_and_nothing_else() -> None:
    debug = config("--profile", "debug")["services"]["debug"]
    assert debug["pid"] == "service:train"
    assert debug["cap_add"] == ["SYS_PTRACE"]
    assert debug["network_mode"] == "none"
    assert debug["user"] == "0:0"  # the capability has no effect for another user
    assert debug["build"]["target"] == "debug"


def test_a_notebook_has_a_token_that_is_never_empty_by_accident() -> None:
    """Without JUPYTER_TOKEN, JupyterLab makes a token. An empty value must not become a login without one."""
    for variables, token in (({}, None), ({"JUPYTER_TOKEN": "secret"}, "secret")):
        notebook = config("--profile", "notebook", **variables)["services"]["notebook"]
        assert notebook["environment"]["JUPYTER_TOKEN"] == token
        assert not any("token" in word or "password" in word for word in notebook["command"])
    (port,) = notebook["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8888", 8888)
    assert notebook["build"]["target"] == "notebook"


def test_every_image_is_built_on_the_same_pinned_base() -> None:
    found = config("--profile", "*")["services"]
    bases = {one["build"]["args"]["BASE_IMAGE"] for one in found.values() if "build" in one}
    assert len(bases) == 1
    assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", bases.pop())
