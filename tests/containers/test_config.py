"""The services as `docker compose config` prints them for the settings of a user. No engine is needed, but Docker Compose is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.conftest import OWN_VARIABLES
from tests.containers.services import ROOT, copy_compose_files

MIG = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"


def has_compose() -> bool:
    command = ["docker", "compose", "version"]
    return bool(shutil.which("docker")) and subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_compose(), reason="Docker Compose is not installed")


def compose(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `docker compose ARGUMENTS` in this checkout, without the settings of its .env, or in a folder with the same files."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    return subprocess.run(
        ["docker", "compose", *(("--env-file", "/dev/null") if folder == ROOT else ()), *arguments],
        cwd=folder,
        env={**inherited, "PWD": str(folder), **variables},
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


def test_without_gpus_no_limit_is_raised_so_that_any_engine_can_start_the_services() -> None:
    """An engine without root, or inside a container, may not raise limits, and refuses to start such a container."""
    for files in ((), ("-f", "docker-compose.yml", "-f", "docker-compose.nodes.yml")):
        assert not [name for name, one in config(*files, GPUS="none")["services"].items() if "ulimits" in one]
    assert service("train", GPUS="2")["ulimits"]["memlock"] == service("train", GPU_IDS="0")["ulimits"]["memlock"] == -1


@pytest.mark.parametrize("variable", ["TRAIN_ARGS", "PREP_ARGS"])
def test_a_quote_without_an_end_in_the_options_of_a_service_is_reported_with_the_name_of_the_variable(variable: str) -> None:
    name, entrypoint = {"TRAIN_ARGS": ("train", "train"), "PREP_ARGS": ("data-prep", "data-prep")}[variable]
    given = service(name, GPUS="none", **{variable: "--recipe 'de mo"})["environment"]["SERVICE_ARGS"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "SERVICE_ARGS": given}
    command = [ROOT / "entrypoints" / entrypoint]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: {variable} = --recipe 'de mo cannot be split into options")


@pytest.mark.parametrize(("variables", "name"), [({"SUDO_USER": "ann"}, "trainer-ann"), ({"USER": "ben"}, "trainer-ben")])
def test_without_the_path_of_the_checkout_users_have_different_projects(variables: dict[str, str], name: str) -> None:
    """sudo removes PWD."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/", "GPUS": "none", **variables}
    command = ["docker", "compose", "--env-file", "/dev/null", "config", "--format", "json"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout)["name"] == name
    kept = subprocess.run(
        command, cwd=ROOT, env=environment | {"COMPOSE_PROJECT_NAME": "mine"}, capture_output=True, text=True, check=True
    )
    assert json.loads(kept.stdout)["name"] == "mine"


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
    assert sorted(debug["cap_add"]) == ["DAC_OVERRIDE", "SYS_PTRACE"]
    assert debug["network_mode"] == "none"
    assert debug["user"] == "0:0"  # the capabilities have no effect for another user
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


def test_code_of_the_user_is_mounted_read_only_and_must_exist() -> None:
    for variables, folder in (({}, ROOT / "extensions"), ({"EXTENSIONS_DIR": "/srv/code"}, Path("/srv/code"))):
        (mount,) = [one for one in service("train", **variables)["volumes"] if one["target"] == "/extensions"]
        assert (mount["type"], Path(mount["source"]), mount["read_only"]) == ("bind", folder, True)
        assert not mount["bind"].get("create_host_path")


def test_memory_has_a_limit_only_if_the_user_sets_one() -> None:
    assert "mem_limit" not in service("train")
    assert service("train", MEMORY_LIMIT="64g")["mem_limit"] == str(64 << 30)
    refused = compose("config", MEMORY_LIMIT="lots")
    assert (refused.returncode != 0, "mem_limit': invalid size: 'lots'" in refused.stderr) == (True, True)
    for name, one in config(TMP_SIZE="4g")["services"].items():
        assert {mount.rpartition("size=")[2] for mount in one["tmpfs"]} == {"4g"}, name


@pytest.mark.parametrize(("variables", "expected_s"), [({}, (120, 60)), ({"STOP_GRACE_PERIOD": "10m"}, (600, 60))])
def test_the_engine_waits_longer_than_the_ranks_need_to_save(variables: Mapping[str, str], expected_s: tuple[int, int]) -> None:
    train = service("train", **variables)
    minutes, seconds = re.fullmatch(r"(\d+)m(\d+)s", train["stop_grace_period"]).groups()  # type: ignore[union-attr]
    grace_s, shutdown_s = int(minutes) * 60 + int(seconds), int(train["environment"]["PET_SHUTDOWN_TIMEOUT"])
    assert (grace_s, shutdown_s) == expected_s
    assert grace_s > shutdown_s


SECRETS = ("-f", "docker-compose.yml", "-f", "docker-compose.secrets.yml")


@pytest.mark.parametrize(
    ("service", "file", "setting", "value", "other"),
    [
        ("train", "train.env", "TRAIN_SEED", '["He said \\"no\\"", "$x {y} #z", "a\\nb"] =\t', "NCCL_DEBUG"),
        ("data-prep", "prepare.env", "PREP_ROW_LENGTH", "a = b; c", "PREP_TEXT__DOCUMENTS"),
    ],
)
@pytest.mark.parametrize("first", ["file", ".env", "shell", "run -e"])
def test_a_setting_in_the_file_of_a_service_counts_unless_a_place_before_it_has_another(
    tmp_path: Path, service: str, file: str, setting: str, value: str, other: str, first: str
) -> None:
    copy_compose_files(tmp_path)
    (tmp_path / file).write_text(f"{setting}='{value}'\n{other}=kept\nKEY_OF_A_SERVICE=secret\n")
    (tmp_path / ".env").write_text(f"GPUS=none\n{setting}=of .env\n" if first != "file" else "GPUS=none\n")
    shell = {setting: "of shell"} if first in ("shell", "run -e") else {}
    result = compose("config", "--format", "json", folder=tmp_path, **shell)
    assert (result.returncode, result.stderr) == (0, ""), result.stderr
    given = json.loads(result.stdout)["services"][service]["environment"]
    variables = {name: text.replace("$$", "$") for name, text in given.items() if text is not None}
    if first == "run -e":
        variables[setting] = "of run -e"
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **variables}
    inside = subprocess.run(
        [ROOT / "entrypoints/train", "env", "-0"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    found = dict(line.split("=", 1) for line in inside.stdout.rstrip("\0").split("\0"))
    assert found[setting] == (value if first == "file" else f"of {first}")
    assert (found[other], found["KEY_OF_A_SERVICE"]) == ("kept", "secret")
    assert "FROM_ENV_FILE" not in found


def test_keys_in_files_are_in_no_setting_of_the_services(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("hf_canary\n")
    result = compose(*SECRETS, "--profile", "*", "config", HF_TOKEN_FILE=str(key))
    assert (result.returncode, result.stderr) == (0, "")
    assert "hf_canary" not in result.stdout
    found = yaml.safe_load(result.stdout)
    assert found["secrets"]["hf_token"]["file"] == str(key)
    assert found["secrets"]["netrc"]["file"] == str(ROOT / "env/empty")
    given = {name: sorted(one["source"] for one in of.get("secrets", [])) for name, of in found["services"].items()}
    assert given["train"] == ["aws_credentials", "hf_token", "netrc"]
    assert given["data-prep"] == ["aws_credentials", "hf_token"]
    assert given["tensorboard"] == given["debug"] == given["notebook"] == []
    for name in ("train", "data-prep"):
        paths = {value for value in found["services"][name]["environment"].values() if str(value).startswith("/run/secrets/")}
        assert paths == {f"/run/secrets/{secret}" for secret in given[name]}


def test_the_second_node_gets_the_keys_of_the_first(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    found = config(*SECRETS, "-f", "docker-compose.nodes.yml", HF_TOKEN_FILE=str(key), GPUS="none")
    first, second = (found["services"][name] for name in ("train", "node-1"))
    assert second["secrets"] == first["secrets"]
    assert found["secrets"]["hf_token"]["file"] == str(key)
    assert second["environment"] == {**first["environment"], "PET_NODE_RANK": "1"}


def test_clients_read_the_files_of_keys_and_an_empty_file_is_no_key(tmp_path: Path) -> None:
    environment = yaml.safe_load((ROOT / "docker-compose.secrets.yml").read_text())["services"]["data-prep"]["environment"]
    token, aws = tmp_path / "hf", tmp_path / "aws"
    names = dict(zip(environment, (str(token), str(aws)), strict=True))
    code = (
        "import huggingface_hub, botocore.session as b; c = b.Session().get_credentials();"
        "print(huggingface_hub.get_token(), c and c.secret_key)"
    )
    for content, said in (
        (("hf_canary", "[default]\naws_access_key_id = a\naws_secret_access_key = canary\n"), "hf_canary canary"),
        (("", ""), "None None"),
    ):
        for path, text in zip((token, aws), content, strict=True):
            path.write_text(text)
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", **names}
        result = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=120, check=True
        )
        assert result.stdout.strip() == said


@pytest.mark.parametrize(
    "files",
    [(), SECRETS, ("-f", "docker-compose.yml", "-f", "docker-compose.watch.yml"), (*SECRETS, "-f", "docker-compose.watch.yml")],
    ids=lambda files: " ".join(files[1::2]) or "plain",
)
@pytest.mark.parametrize("gpus", ["all", "none", "2"])
def test_every_combination_of_files_is_accepted_with_all_profiles(files: tuple[str, ...], gpus: str) -> None:
    found = config(*files, "--profile", "*", GPUS=gpus)["services"]
    assert sorted(found) == ["data-prep", "debug", "notebook", "tensorboard", "train"]


def test_watched_sources_are_those_of_the_image_and_a_change_restarts_train() -> None:
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.watch.yml")
    train = config(*files)["services"]["train"]
    synced = {Path(one["path"]): one["target"] for one in train["develop"]["watch"] if one["action"] == "sync+restart"}
    assert synced == {ROOT / name: f"/app/{name}" for name in ("common", "data_pipeline", "trainer", "entrypoints", "env/recipes")}
    rebuilt = {Path(one["path"]) for one in train["develop"]["watch"] if one["action"] == "rebuild"}
    assert rebuilt == {ROOT / "Dockerfile", ROOT / "env/requirements-image.lock"}
    assert not train.get("read_only")
    assert train["build"]["target"] == "develop"
    stage = (ROOT / "Dockerfile").read_text().split("FROM trainer AS develop\n")[1].split("\nFROM ")[0]
    compiled = re.search(r"compileall .*--invalidation-mode checked-hash (.*)", stage)  # otherwise a changed source has no effect
    assert compiled is not None
    assert set(compiled[1].split()) == {"/app/common", "/app/data_pipeline", "/app/trainer", "/app/env"}
    assert (train["cap_drop"], sorted(train["cap_add"])) == (["ALL"], ["KILL", "SETGID", "SETUID"])
    assert train["entrypoint"] == ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "train"]
    assert train["image"] != config()["services"]["train"]["image"]


def test_the_development_container_is_a_target_of_the_dockerfile_and_needs_no_gpu() -> None:
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert f"\nFROM trainer AS {settings['build']['target']}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert settings["remoteUser"] == "trainer"
    assert "--gpus" not in str(settings)
    assert os.access(ROOT / settings["postCreateCommand"].split()[0], os.X_OK)
