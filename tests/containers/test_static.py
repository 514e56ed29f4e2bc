"""Properties of the container files, read from the files. No engine is needed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from env.compose_env import SERVICES, files, names

ROOT = Path(__file__).resolve().parents[2]
DIGEST_PIN = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
SCRIPTS = sorted(
    path
    for folder in ("entrypoints", "env", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix != ".pyc" and path.read_bytes().startswith(b"#!")
)


class ComposeLoader(yaml.SafeLoader):
    """YAML with the tag of Compose that removes an inherited value."""


ComposeLoader.add_constructor("!reset", lambda loader, node: "!reset")


def load(name: str) -> dict[str, Any]:
    return yaml.load((ROOT / name).read_text(encoding="utf-8"), ComposeLoader)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(load("docker-compose.yml")["services"])


def test_there_are_three_services_over_one_volume(services: dict[str, Any]) -> None:
    assert sorted(services) == ["data-prep", "tensorboard", "train"]
    for service in services.values():
        assert any(str(volume).startswith("${WORKSPACE:-workspace}:/workspace") for volume in service["volumes"])


def test_every_service_runs_without_privileges(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["user"] == "${RUN_UID:-1000}:${RUN_GID:-1000}", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert not {"privileged", "cap_add", "pid", "ipc", "network_mode", "devices"} & service.keys(), name
        assert "docker.sock" not in str(service["volumes"]), name


def test_tensorboard_is_on_loopback_alone_and_cannot_write(services: dict[str, Any]) -> None:
    assert [port.split(":")[0] for port in services["tensorboard"]["ports"]] == ["127.0.0.1"]
    assert all(volume.endswith(":ro") for volume in services["tensorboard"]["volumes"])
    assert not any("ports" in services[name] for name in ("data-prep", "train"))


def test_tensorboard_is_asked_to_serve_other_addresses_only_inside_the_container(services: dict[str, Any]) -> None:
    assert services["tensorboard"]["command"] == ["--bind_all"]
    assert "--bind_all" not in (ROOT / "entrypoints/tensorboard").read_text().split("exec ", 1)[1]


def test_the_entrypoint_sees_the_name_of_which_compose_makes_the_run_directory(services: dict[str, Any]) -> None:
    for variable, users in (("RUN_NAME", {"train"}), ("DATA_NAME", {"data-prep", "train"})):
        found = {name: service.get("environment", {}) for name, service in services.items()}
        assert {name for name in found if f"${{{variable}" in str(found[name])} == users
        assert all(variable in found[name] for name in users)
    found = services["train"]["environment"]
    assert found["TRAIN_RUN"] == f"/workspace/runs/{found['RUN_NAME']}"


def test_the_image_takes_rights_away_and_lists_its_packages_after_the_last_of_them_is_installed() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    dockerfile = text.partition("\nFROM ${BASE_IMAGE} AS trainer\n")[2].partition("\nFROM ")[0]
    installed = dockerfile.rindex("apt/install")
    assert dockerfile.index("-perm /6000 ! -type l -exec chmod ug-s {} +") > installed
    assert dockerfile.index(">/app/apt-packages.txt") > installed
    assert "PYTHONSAFEPATH=1" in dockerfile


def test_train_waits_for_the_data_and_has_time_to_save(services: dict[str, Any]) -> None:
    train = services["train"]
    assert train["depends_on"]["data-prep"]["condition"] == "service_completed_successfully"
    grace, shutdown = train["stop_grace_period"], train["environment"]["PET_SHUTDOWN_TIMEOUT"]
    assert (grace, shutdown) == ("${STOP_GRACE_PERIOD:-120s}", "${PET_SHUTDOWN_TIMEOUT:-60}")


def test_tensorboard_starts_after_train_so_that_a_port_in_use_cannot_prevent_training(services: dict[str, Any]) -> None:
    assert services["tensorboard"]["depends_on"] == {"train": {"condition": "service_started"}}


def test_each_checkout_has_a_project_and_an_image_of_its_own(services: dict[str, Any]) -> None:
    assert load("docker-compose.yml")["name"] == "trainer-${PWD:-${SUDO_USER:-${USER:-}}}"
    assert {service["image"] for service in services.values()} == {"${IMAGE:-trainer:${COMPOSE_PROJECT_NAME}}"}


def test_data_and_run_have_folders_of_their_own_names(services: dict[str, Any]) -> None:
    prepared, trained = services["data-prep"]["environment"], services["train"]["environment"]
    assert prepared["PREP_OUTPUT"] == trained["TRAIN_DATA"] == f"/workspace/data/{prepared['DATA_NAME']}"


def test_what_is_held_in_memory_has_a_limit(services: dict[str, Any]) -> None:
    for service in services.values():
        assert all(",size=" in mount for mount in service["tmpfs"])


def test_the_base_image_is_pinned_by_digest_in_one_form_everywhere(services: dict[str, Any]) -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    (pinned,) = re.findall(r"^ARG BASE_IMAGE=(.*)$", dockerfile, re.MULTILINE)
    assert DIGEST_PIN.fullmatch(pinned)
    assert services["data-prep"]["build"]["args"]["BASE_IMAGE"] == f"${{BASE_IMAGE:-{pinned}}}"
    for name in ("Dockerfile", "docker-compose.yml", "docs/containers.md"):
        for reference in re.findall(r"pytorch/pytorch:[^\s`}]+@[^\s`}]*", (ROOT / name).read_text(encoding="utf-8")):
            assert DIGEST_PIN.fullmatch(reference), f"{name}: {reference}"
    stages = re.findall(r"^FROM (.+)", dockerfile, re.MULTILINE)
    made = {name for stage in stages for name in re.findall(r" AS (\w+)$", stage)}
    assert {stage.partition(" ")[0] for stage in stages} - made == {"${BASE_IMAGE}"}
    assert stages[-1] == "trainer"  # without a target, a build makes the image of the services, not that of a tool


def test_the_expected_versions_are_those_of_the_locked_wheels() -> None:
    expected = dict(
        line.split("=", 1) for line in (ROOT / "env/versions.env").read_text().splitlines() if "=" in line and line[0] != "#"
    )
    locked = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "env/base/requirements.lock").read_text(), re.MULTILINE))
    assert expected["TORCH_VERSION"] == locked["torch"]
    assert expected["NCCL_VERSION"] == locked["nvidia-nccl-cu13"]
    assert locked["nvidia-cudnn-cu13"].startswith(expected["CUDNN_VERSION"] + ".")
    assert locked["nvidia-cuda-runtime"].startswith(expected["CUDA_VERSION"] + ".")


@pytest.mark.parametrize("service", SERVICES)
def test_compose_passes_every_setting_on(services: dict[str, Any], service: str) -> None:
    for path, content in files(service).items():
        assert path.read_text(encoding="utf-8") == content, "run `make compose-env`"
    extended = {"file": f"env/settings/{service}.yml", "service": service}
    gpus = load("docker-compose.gpus.yml")["services"]
    extending = list(gpus.values()) if service == "train" else [services[service]]
    assert [one["extends"] for one in extending] == [extended] * len(extending)


def test_the_compose_file_reads_in_one_sitting() -> None:
    assert len((ROOT / "docker-compose.yml").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("name", [".github/workflows/ci.yml", "examples/ci/github.yml"])
def test_actions_of_a_workflow_are_pinned_by_commit(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used), used
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}


def test_the_example_for_ci_tests_the_services_and_keeps_the_report_of_junit_also_after_a_failure() -> None:
    steps = yaml.safe_load((ROOT / "examples/ci/github.yml").read_text(encoding="utf-8"))["jobs"]["smoke"]["steps"]
    (report,) = [found[1] for step in steps if (found := re.fullmatch(r"make smoke ARGS=--junitxml=(\S+)", step.get("run", "")))]
    assert (steps[-1]["with"]["path"], steps[-1]["if"]) == (report, "${{ !cancelled() }}")
    assert "actions/upload-artifact@" in steps[-1]["uses"]
    command = ["make", "--dry-run", "--always-make", "smoke", "ARGS=--junitxml=x.xml"]
    recipe = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "pytest tests/containers -m 'containers and not rebuild' --junitxml=x.xml" in recipe


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_is_executable_and_stops_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    if b"bash" in script.read_bytes().splitlines()[0]:
        assert b"\nset -euo pipefail\n" in script.read_bytes()


def test_plain_make_prints_a_line_of_help_for_every_target() -> None:
    listed = subprocess.run(["make"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wanted = ("demo", "up", "down", "test", "image", "base", "smoke", "lint", "lock")
    assert all(re.search(rf"^make {target} +\S", listed, re.MULTILINE) for target in wanted)


def test_the_users_text_is_mounted_read_only_and_must_exist(services: dict[str, Any]) -> None:
    (mount,) = [volume for volume in services["data-prep"]["volumes"] if isinstance(volume, dict)]
    assert mount["target"] == "/text"
    assert mount["read_only"] is True
    assert mount["bind"] == {"create_host_path": False}


def test_text_and_code_of_the_user_stay_out_of_the_repository_and_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for folder in ("text", "extensions"):
        assert (ROOT / folder / ".gitignore").read_text().split("\n", 1)[1].split() == ["*", "!.gitignore", "!README.md"]
        assert f"!{folder}" not in ignored


def test_the_example_of_settings_names_settings_that_compose_uses() -> None:
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    passed_on = {name for service in SERVICES for name in names(service)}
    named = re.findall(r"^#([A-Z_]+)=\S+$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(named) >= 20
    assert [name for name in named if f"${{{name}:" not in compose and name not in passed_on] == []


def test_the_override_for_two_nodes_changes_only_what_makes_two_nodes_of_the_service() -> None:
    services = load("docker-compose.nodes.yml")["services"]
    assert sorted(services) == ["node-1", "train"]
    first, second = (services[name]["environment"] for name in ("train", "node-1"))
    of_secrets = {name: value for name, value in second.items() if str(value).startswith("/run/secrets/")}
    assert second == first | {"PET_NODE_RANK": 1} | of_secrets
    assert (first["PET_NNODES"], first["PET_NODE_RANK"], first["PET_MASTER_ADDR"]) == (2, 0, "train")
    assert services["node-1"]["extends"] == {"file": "docker-compose.yml", "service": "train"}
    for service in services.values():
        assert service["deploy"] == "!reset"  # two nodes cannot share the GPUs
        assert not {"ports", "volumes", "network_mode", "privileged"} & service.keys()
    (device,) = {service["environment"]["NVIDIA_VISIBLE_DEVICES"] for service in services.values()}
    assert device == "none"
