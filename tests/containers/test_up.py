"""env/up with stand-ins for docker and nvidia-smi, which record their calls. No engine is needed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.paths import VERSION
from tests.containers.services import ROOT

DOCKER = r"""#!/usr/bin/env bash
echo "$*" >>"$STAND_IN/calls"
fixed() { if [ -e "$STAND_IN/$1" ]; then cat "$STAND_IN/$1"; else printf '%s\n' "$2"; fi; }
case "$*" in
    "info --format {{.Architecture}}") fixed architecture x86_64 ;;
    "info --format"*) fixed runtimes '{"runc":{}}' ;;
    "compose version --short") echo 2.26.1 ;;
    *" config --images") echo "${IMAGE:-trainer:project}" ;;
    *" config data-prep") printf '        source: %s\n        target: /text\n' "$(realpath -m "${TEXT_DIR:-text}")" ;;
    *" config train") printf '        source: %s\n        target: /extensions\n' "$(realpath -m "${EXTENSIONS_DIR:-text}")" ;;
    "run "*"--ulimit memlock=-1"*) [ ! -e "$STAND_IN/hard-limit" ] ;;
    "run "*"ulimit -Hl") cat "$STAND_IN/hard-limit" ;;
    *" config")
        chosen=$(sed -n 's/^COMPOSE_PROJECT_NAME=//p' "$ENV_FILE")
        echo "name: ${COMPOSE_PROJECT_NAME:-${chosen:-trainer-$(tr -dc a-z0-9_- <<<"$PWD")}}"
        printf 'services:\n  train:\n    environment:\n'
        printf '      FROM_ENV_FILE: "TRAIN_OPTIM__LR=%s\\x1FTRAIN_THREADS=2\\x1F"\n' "${LR_OF_TRAIN_ENV:-1e-3}"
        printf '      RUN_NAME: %s\n      TRAIN_SEED: null\n    image: x\n' "${RUN_NAME:-demo}"
        ;;
    *"--dry-run create"*) fixed would-be " Container p-train-1  Running" ;;
    "ps --all"*"project=trainer "*) fixed folders-of-trainer "" ;;
    "ps --all"*) fixed folders "" ;;
    "ps --quiet"*service=train*) fixed training "" ;;
    "ps --quiet"*service=tensorboard*) fixed tensorboard "" ;;
    "inspect "*) printf 'FROM_ENV_FILE=TRAIN_OPTIM__LR=1e-3\x1fTRAIN_THREADS=2\x1f\nRUN_NAME=demo\n' ;;
    "image inspect --format"*) fixed image-id "" ;;
    "volume inspect"*) [ -e "$STAND_IN/old-volume" ] ;;
esac
"""


COMPOSE = ("docker-compose.yml", "docker-compose.gpus.yml")
SETTINGS = tuple(f"env/settings/{service}.{kind}" for service in ("data-prep", "train") for kind in ("yml", "env"))
FILES = (
    *("env/up", "env/versions.env", "env/host.env", "env/build-secrets", "env/image-arguments", "env/empty"),
    *("env/requirements-image.lock", "common/paths.py", "Dockerfile", *COMPOSE),
)
PROGRAMS = (
    *("bash", "cat", "chown", "cksum", "cut", "date", "dirname", "env", "git", "grep", "head", "id", "mkdir", "nproc", "paste"),
    *("realpath", "sed", "seq", "sh", "sha256sum", "sort", "tail", "timeout", "touch", "tr", "wc"),
)
"""All programs that env/up and the stand-ins call, except docker and nvidia-smi."""


@dataclass
class Machine:
    """The files of a checkout, a PATH with the stand-ins, and the variables of a user."""

    folder: Path
    checkout: Path
    variables: dict[str, str] = field(default_factory=dict)

    def engine_says(self, what: str, text: str) -> None:
        (self.folder / what).write_text(f"{text}\n")

    def nvidia_smi(self, script: str) -> None:
        path = self.folder / "bin/nvidia-smi"
        path.write_text(f"#!/usr/bin/env bash\n{script}\n")
        path.chmod(0o755)

    def up(self, *options: str, **variables: str) -> tuple[int, str]:
        """Run env/up, and return its exit code and output."""
        result = subprocess.run(
            [self.checkout / "env/up", *options],
            env={**self.variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return result.returncode, result.stdout

    @property
    def written(self) -> dict[str, str]:
        lines = (self.checkout / ".env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without a GPU: the search path contains no nvidia-smi, even if this machine has one."""
    checkout = tmp_path / "checkout"
    for name in (*FILES, *SETTINGS):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    (checkout / "text").mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).symlink_to(shutil.which(name) or name)
    (programs / "docker").write_text(DOCKER)
    (programs / "docker").chmod(0o755)
    variables = {"PATH": str(programs), "HOME": str(tmp_path), "STAND_IN": str(tmp_path), "ENV_FILE": ".env"}
    variables |= {"CA_BUNDLE": "env/empty", "PIP_CONF": "env/empty", "BASE_IMAGE": "python:3"}  # otherwise env/up searches for them
    return Machine(tmp_path, checkout, variables)


WORKING = 'printf "580.65.06\\n580.65.06\\n"'
NVIDIA = '{"nvidia":{},"runc":{}}'


def test_a_machine_without_nvidia_smi_has_no_gpu(machine: Machine) -> None:
    code, said = machine.up("--detach")
    assert code == 0, said
    assert machine.written["GPUS"] == "none"
    assert machine.calls[-1] == "compose --env-file .env up --detach"
    assert "from now on, docker compose up does the same" in said


def test_gpus_that_work_are_handed_over(machine: Machine) -> None:
    machine.nvidia_smi(WORKING)
    machine.engine_says("runtimes", NVIDIA)
    code, said = machine.up()
    assert code == 0, said
    assert "2 GPU(s) with driver 580.65.06" in said
    assert machine.written["GPUS"] == "all"
    assert "CPU_RANKS" not in machine.written


@pytest.mark.parametrize("variables", [{"GPUS": "2"}, {"GPUS": "1"}, {"GPU_IDS": "0,3"}, {"GPU_IDS": "MIG-c7384736-a75d-5afc"}])
def test_some_of_the_gpus_can_be_asked_for(machine: Machine, variables: dict[str, str]) -> None:
    machine.nvidia_smi(WORKING)
    machine.engine_says("runtimes", NVIDIA)
    code, said = machine.up(**variables)
    assert code == 0, said
    assert f"these settings apply to this command only: {next(iter(variables))}" in said
    assert "from now on" not in said


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"GPUS": "3"}, "GPUS=3, but this machine has 2 GPU(s)"),
        ({"GPUS": "0"}, "GPUS=0 is unknown; use all, none, or a number"),
        (
            {"GPUS": "0,3"},
            "GPUS=0,3 is unknown; use all, none, or a number from 1 to 8, or 16. To choose GPUs by index or UUID: GPU_IDS=0,3",
        ),
        ({"GPU_IDS": "0, 3"}, "GPU_IDS=0, 3 must be indexes or UUIDs"),
        ({"GPU_IDS": "0,3", "GPUS": "2"}, "GPU_IDS=0,3 chooses GPUs, so GPUS=2 must be all"),
    ],
)
def test_gpus_that_cannot_be_meant_are_refused(machine: Machine, variables: dict[str, str], reason: str) -> None:
    machine.nvidia_smi(WORKING)
    machine.engine_says("runtimes", NVIDIA)
    code, said = machine.up(**variables)
    assert (code, reason in said) == (1, True), said
    assert not any(call.startswith("build") for call in machine.calls)


@pytest.mark.parametrize(
    ("script", "runtimes", "reason"),
    [
        ('echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18', NVIDIA, "Driver/library version mismatch"),
        ("echo 570.86.10", NVIDIA, "the GPU driver is 570.86.10, and CUDA 13.0 needs 580 or later"),
        (WORKING, '{"runc":{}}', "NVIDIA Container Toolkit"),
    ],
    ids=["nvidia-smi fails", "old driver", "no toolkit"],
)
@pytest.mark.parametrize("chosen", ["", "all"])
def test_gpus_that_cannot_be_used_end_up_with_the_reason(
    machine: Machine, script: str, runtimes: str, reason: str, chosen: str
) -> None:
    machine.nvidia_smi(script)
    machine.engine_says("runtimes", runtimes)
    (machine.checkout / ".env").write_text(f"GPUS={chosen}\n" if chosen else "")
    code, said = machine.up()
    assert code == 1
    assert reason in said
    assert "GPUS=none make up" in said
    assert not any(call.endswith(" up") or call.startswith("build") for call in machine.calls)
    code, said = machine.up(GPUS="none")
    assert code == 0, said


def test_an_older_driver_serves_a_base_image_for_older_drivers(machine: Machine) -> None:
    machine.nvidia_smi("echo 560.28.03")
    machine.engine_says("runtimes", NVIDIA)
    versions = machine.checkout / "env/versions.env"
    versions.write_text(versions.read_text().replace("CUDA_VERSION=13.0", "CUDA_VERSION=12.6"))
    code, said = machine.up()
    assert code == 0, said


def test_nvidia_smi_may_say_more_than_is_read_of_it(machine: Machine) -> None:
    machine.nvidia_smi("seq -f 580.%06.0f 100000 || exit 9")
    machine.engine_says("runtimes", NVIDIA)
    code, said = machine.up()
    assert code == 0, said


def test_a_text_folder_that_is_a_file_or_missing_is_named(machine: Machine) -> None:
    missing, file = machine.folder / "missing", machine.folder / "file.txt"
    file.touch()
    code, said = machine.up(TEXT_DIR=str(missing))
    assert (code, f"TEXT_DIR: {missing} does not exist" in said) == (1, True), said
    code, said = machine.up(TEXT_DIR=str(file))
    assert (code, f"TEXT_DIR: {file} is a file" in said) == (1, True), said


def test_a_folder_of_extensions_that_is_missing_is_named(machine: Machine) -> None:
    missing = machine.folder / "missing"
    code, said = machine.up(EXTENSIONS_DIR=str(missing))
    assert (code, f"EXTENSIONS_DIR: {missing} does not exist" in said) == (1, True), said


@pytest.mark.parametrize(("platform", "code"), [("", 1), ("linux/amd64", 0)])
def test_an_engine_for_which_there_is_no_image_is_refused(machine: Machine, platform: str, code: int) -> None:
    machine.engine_says("architecture", "aarch64")
    found, said = machine.up(DOCKER_DEFAULT_PLATFORM=platform)
    assert (found, "aarch64, and the image is built for x86-64 only" in said) == (code, code == 1), said


@pytest.mark.parametrize(("variables", "tagged"), [({}, True), ({"IMAGE": "mine:1"}, False)])
def test_the_image_has_the_name_in_the_commands_of_the_documentation_unless_you_choose_another(
    machine: Machine, variables: dict[str, str], tagged: bool
) -> None:
    code, said = machine.up("--env", **variables)
    assert code == 0, said
    assert ("--tag trainer:local " in next(call for call in machine.calls if call.startswith("build "))) == tagged


def test_limits_are_lowered_only_for_gpus_and_only_if_the_engine_may_not_raise_them(machine: Machine) -> None:
    code, said = machine.up(GPUS="none")
    assert not [call for call in machine.calls if call.startswith("run ")], said
    (machine.checkout / ".env").unlink()
    machine.nvidia_smi(WORKING)
    machine.engine_says("runtimes", NVIDIA)
    machine.engine_says("hard-limit", "8192")
    code, said = machine.up()
    assert code == 0, said
    assert machine.written["ULIMIT_MEMLOCK"] == str(8192 * 1024)


def test_the_projects_name_is_kept_when_the_checkout_moves(machine: Machine) -> None:
    machine.up()
    name = machine.written["COMPOSE_PROJECT_NAME"]
    assert name.endswith("checkout")
    machine.checkout = machine.checkout.rename(machine.folder / "moved")
    machine.engine_says("folders", str(machine.folder / "checkout"))
    code, said = machine.up()
    assert code == 0, said
    assert machine.written["COMPOSE_PROJECT_NAME"] == name


def test_a_copy_of_a_checkout_does_not_end_what_the_original_runs(machine: Machine) -> None:
    machine.up()
    original = machine.checkout
    machine.checkout = Path(shutil.copytree(original, machine.folder / "copy"))
    machine.engine_says("folders", str(original))
    (machine.folder / "calls").unlink()
    code, said = machine.up()
    assert code == 1
    assert f"belongs to {original}" in said
    assert "COMPOSE_PROJECT_NAME" in said
    assert not any(" up" in call for call in machine.calls)


def test_the_digest_of_the_image_is_written_with_the_revision_that_was_built_and_replaced_by_the_next_build(
    machine: Machine,
) -> None:
    for digest in ("a" * 64, "b" * 64):
        machine.engine_says("image-id", f"sha256:{digest}")
        code, said = machine.up()
        assert code == 0, said
        revision, _, written = machine.written["IMAGE_DIGEST"].rpartition("@")
        assert written == f"sha256:{digest}"
        assert f"--build-arg REVISION={revision} " in next(call for call in machine.calls if call.startswith("build "))
    assert (machine.checkout / ".env").read_text().count("IMAGE_DIGEST=") == 1
    machine.engine_says("training", "c0ffee")
    machine.engine_says("would-be", " Container p-train-1  Running")
    machine.engine_says("image-id", f"sha256:{'c' * 64}")
    code, said = machine.up()
    assert code == 0, said
    assert machine.written["IMAGE_DIGEST"].endswith("b" * 64), "changed while a run trains in a container of the image before"


def test_the_build_is_told_what_the_image_is_made_from_and_no_token(machine: Machine) -> None:
    git = ("git", "-C", str(machine.checkout), "-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first", "--date=2026-01-01T00:00:00Z"]):
        subprocess.run([*git, *command], check=True, env=os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T03:04:05Z"})
    subprocess.run([*git, "remote", "add", "origin", "https://name:token@example.org/trainer.git"], check=True)
    (machine.checkout / ".git/info/exclude").write_text(".env\n")
    pinned = f"pytorch/pytorch:1@sha256:{'c' * 64}"
    code, said = machine.up(BASE_IMAGE=pinned)
    assert code == 0, said
    build = next(call for call in machine.calls if call.startswith("build "))
    arguments = dict(re.findall(r"--build-arg ([A-Z_]+)=(\S+)", build))
    revision = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert arguments == {
        "BASE_IMAGE": pinned,
        "BASE_DIGEST": f"sha256:{'c' * 64}",
        "REVISION": revision,
        "VERSION": VERSION,
        "SOURCE": "https://example.org/trainer.git",
        "SOURCE_DATE_EPOCH": "1767323045",
        "CREATED": "2026-01-02T03:04:05Z",
        "LOCK_DIGEST": f"sha256:{hashlib.sha256((ROOT / 'env/requirements-image.lock').read_bytes()).hexdigest()}",
    }


def test_the_digest_of_a_base_that_was_built_here_is_its_id(machine: Machine) -> None:
    machine.engine_says("image-id", f"sha256:{'d' * 64}")
    code, said = machine.up(BASE_IMAGE="own:1")
    assert code == 0, said
    assert f"--build-arg BASE_DIGEST=sha256:{'d' * 64} " in next(call for call in machine.calls if call.startswith("build "))


def test_a_path_too_long_for_the_name_of_an_image_is_shortened(machine: Machine) -> None:
    deep = machine.folder / ("a" * 60) / ("b" * 60)
    deep.parent.mkdir()
    machine.checkout = machine.checkout.rename(deep)
    code, said = machine.up()
    assert code == 0, said
    assert len(machine.written["COMPOSE_PROJECT_NAME"]) < 30


def test_services_of_an_earlier_version_keep_their_project_and_its_volume(machine: Machine) -> None:
    machine.engine_says("folders-of-trainer", str(machine.checkout))
    machine.engine_says("old-volume", "")
    code, said = machine.up()
    assert code == 0, said
    assert machine.written["COMPOSE_PROJECT_NAME"] == "trainer"
    (machine.checkout / ".env").unlink()
    machine.engine_says("folders-of-trainer", "/home/somebody/else")
    code, said = machine.up()
    assert machine.written["COMPOSE_PROJECT_NAME"] != "trainer"
    assert "the volume trainer_workspace of an earlier version is not used" in said


@pytest.mark.parametrize(
    ("before", "gpus"), [("docker-compose.yml:docker-compose.cpu.yml", "none"), ("docker-compose.yml", "all"), ("own.yml", "all")]
)
def test_files_chosen_by_an_earlier_version_do_not_hide_an_override(machine: Machine, before: str, gpus: str) -> None:
    (machine.checkout / "docker-compose.override.yml").touch()
    (machine.checkout / ".env").write_text(f"COMPOSE_FILE={before}\n")
    machine.nvidia_smi(WORKING)
    machine.engine_says("runtimes", NVIDIA)
    code, said = machine.up()
    assert code == 0, said
    assert machine.written["GPUS"] == gpus
    if before == "own.yml":
        assert machine.written["COMPOSE_FILE"] == before
        assert "docker-compose.override.yml has no effect" in said
    else:
        assert "COMPOSE_FILE" not in machine.written


def test_variables_that_nobody_passes_on_are_named(machine: Machine) -> None:
    (machine.checkout / ".env").write_text("PET_TEE=3\nPET_NNODES=1\n")
    (machine.checkout / "train.env").write_text("NCCL_ALGO=Tree\n")
    passed_on = {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "NCCL_ALGO": "Tree"}
    code, said = machine.up(NCCL_TOPO_FILE="/x", PREP_ROW_LENGHT="64", **passed_on)
    assert code == 0, said
    named = {line.split()[1] for line in said.splitlines() if " has no effect" in line}
    assert named == {"PET_TEE", "NCCL_TOPO_FILE", "PREP_ROW_LENGHT"}


def test_a_variable_that_has_no_effect_in_the_file_of_a_service_is_named(machine: Machine) -> None:
    (machine.checkout / "train.env").write_text("NCCL_ALGO=Tree\nTRAIN_SEED=1\nTRAIN_RECIPE=demo\nCPU_RANKS=2\n")
    (machine.checkout / "prepare.env").write_text("AWS_PROFILE=mine\nPREP_ROW_LENGTH=64\nDATA_NAME=mine\n")
    code, said = machine.up()
    assert code == 0, said
    named = {(line.split()[1], line.split()[6]) for line in said.splitlines() if " has no effect" in line}
    assert named == {("TRAIN_RECIPE", "train.env:"), ("CPU_RANKS", "train.env:"), ("DATA_NAME", "prepare.env:")}, said
    assert "TRAIN_RECIPE has no effect in train.env: docker-compose.yml takes it from .env. Put it there" in said


@pytest.mark.parametrize(
    ("changed", "named"), [({}, "RUN_NAME"), ({"LR_OF_TRAIN_ENV": "2e-3"}, "RUN_NAME TRAIN_OPTIM__LR")], ids=["shell", "train.env"]
)
def test_a_run_that_is_training_is_not_ended(machine: Machine, changed: dict[str, str], named: str) -> None:
    machine.engine_says("training", "c0ffee")
    machine.engine_says("would-be", " Container p-train-1  Recreate\n Container p-data-prep-1  Running")
    code, said = machine.up(RUN_NAME="second", **changed)
    assert code == 1
    assert "the run 'demo' is training" in said
    assert f"with other settings ({named})" in said
    assert "RUN_NAME=second docker compose run --detach --no-deps train" in said
    assert not any(call.startswith("build") or call.endswith(" up") for call in machine.calls)


def test_the_same_command_again_leaves_a_training_run_and_its_image_alone(machine: Machine) -> None:
    machine.engine_says("training", "c0ffee")
    code, said = machine.up()
    assert code == 0, said
    assert machine.calls[-1].endswith(" up")
    assert not any(call.startswith("build") for call in machine.calls)


def test_a_policy_that_would_start_finished_runs_again_is_refused(machine: Machine) -> None:
    code, said = machine.up(RESTART="unless-stopped")
    assert (code, "RESTART=unless-stopped" in said) == (1, True)
    code, said = machine.up(RESTART="on-failure:3")
    assert code == 0, said


def test_a_port_of_tensorboard_that_is_in_use_does_not_keep_training_from_starting(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, said = machine.up(TENSORBOARD_PORT=port)
        assert code == 0, said
        assert f"TENSORBOARD_PORT={port} is in use" in said
        assert machine.calls[-1].endswith(" up --scale tensorboard=0")
        machine.engine_says("tensorboard", "decaf")  # the port is used by this project itself
        code, said = machine.up(TENSORBOARD_PORT=port)
        assert machine.calls[-1].endswith(" up")


def test_where_no_port_is_asked_for_a_free_one_is_taken(machine: Machine) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 6006))
            other.listen()
        except OSError:
            pass  # another program already uses this port
        code, said = machine.up()
    assert code == 0, said
    assert int(machine.written["TENSORBOARD_PORT"]) > 6006
    assert f"http://127.0.0.1:{machine.written['TENSORBOARD_PORT']}" in said


def test_without_an_engine_it_says_how_to_get_one(machine: Machine) -> None:
    (machine.folder / "bin/docker").write_text("#!/bin/sh\nexit 1\n")
    code, said = machine.up()
    assert (code, "env/install-docker.sh --start" in said) == (1, True)
