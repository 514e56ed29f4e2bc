"""Faults around the services on a real engine: kills, restarts, full disks, used ports, unusable text, other checkouts.

Recipe `smoke`, two ranks, no GPU. A disturbed run has the losses of the uninterrupted run `whole`. A run that a test disturbs has
no step limit that it could reach first. Its schedule is as long as that of `whole`, so its first steps are the same.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ExitCode
from tests.containers.conftest import free_port
from tests.containers.services import IMAGE, PROJECT, ROOT, Services, copy_compose_files, eventually

pytestmark = pytest.mark.containers

STEPS = 100
ENDLESS = "100000"


@pytest.fixture(scope="module")
def disturbed(whole: Services) -> Services:
    """The settings of the runs of this file. The data is prepared."""
    return whole.with_variables(TRAIN_LIMITS__STEPS=str(STEPS), TRAIN_EVAL__EVERY_STEPS="1000")


@pytest.fixture(scope="module")
def expected(whole: Services) -> list[tuple[int, str]]:
    """The first losses of the uninterrupted run."""
    return whole.losses("whole")[:STEPS]


def said(services: Services, *names: str) -> str:
    return services.compose("logs", "--no-log-prefix", *(names or ("train",)), check=False).stdout[-6000:]


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True, timeout=200).stdout


def started(services: Services, name: str, steps: int = STEPS // 4) -> Services:
    """Start a run without a step limit, and return its settings after it has made `steps` steps."""
    run = services.with_variables(RUN_NAME=name, TRAIN_LIMITS__STEPS=ENDLESS)
    run.compose("up", "--detach", check=False)
    eventually(lambda: len(run.losses(name)) >= steps, 240, f"{steps} steps of {name}")
    return run


def finished(services: Services, name: str) -> list[tuple[int, str]]:
    """Resume a run that was started without a step limit, up to the usual limit, and return its losses."""
    run = services.with_variables(RUN_NAME=name, TRAIN_LIMITS__STEPS=str(STEPS))
    run.compose("up", "--detach")
    assert run.wait("train") == 0, said(run)
    return run.losses(name)[:STEPS]


def project(services: Services, name: str, **variables: str) -> Services:
    """Return the same files under another project name, with a separate volume and port."""
    own = {"COMPOSE_PROJECT_NAME": f"{PROJECT}-{name}", "TENSORBOARD_PORT": str(free_port())}
    return services.with_variables(**own, **variables)


@pytest.fixture
def removed_afterwards() -> Iterator[list[Services]]:
    """A list of projects that are removed after the test, with their volumes."""
    projects: list[Services] = []
    yield projects
    for each in projects:
        each.compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)


def test_a_killed_container_goes_on_to_the_same_losses(disturbed: Services, expected: list[tuple[int, str]]) -> None:
    run = started(disturbed, "killed")
    docker("kill", "--signal", "KILL", run.inspect("train")["Id"])
    assert run.wait("train") == 137
    assert finished(run, "killed") == expected


def test_a_run_goes_on_by_itself_after_a_restart_of_the_engine_if_asked_to(
    disturbed: Services, expected: list[tuple[int, str]]
) -> None:
    """Restarts only an engine that env/install-docker.sh has started. Another engine may run containers of other people."""
    if not Path("/run/docker-started-by-hand.pid").exists():
        pytest.skip("the engine was not started by env/install-docker.sh --start, so it is not stopped")
    run = started(disturbed.with_variables(RESTART="on-failure:3"), "restarted")
    for option in ("--stop", "--start"):
        subprocess.run([ROOT / "env/install-docker.sh", option], check=True, capture_output=True, timeout=300)
    run.compose("up", "--detach", "--no-deps", "tensorboard")
    eventually(lambda: len(run.losses("restarted")) >= STEPS, 240, "the steps after the restart")
    assert "SIGTERM received; stopping, after a save if a step was trained" in said(run)
    run.compose("kill", "train")
    assert run.losses("restarted")[:STEPS] == expected


USED_UP = "the memory limit of 272.6 MB is used up; raise it (Compose: MEMORY_LIMIT"


def test_a_memory_limit_that_is_too_small_is_named_with_its_setting(disturbed: Services) -> None:
    small = disturbed.with_variables(MEMORY_LIMIT="260m", TRAIN_MAX_RESTARTS="0", RUN_NAME="small", DATA_NAME="small")
    prepared = small.compose("run", "--rm", "-T", "data-prep", "--workers", "6", check=False)
    assert prepared.returncode == ExitCode.WORKER, prepared.stderr[-2000:]
    assert f"error: a worker process was killed: {USED_UP}" in prepared.stderr
    trained = small.with_variables(DATA_NAME="demo").compose("run", "--rm", "-T", "--no-deps", "train", check=False)
    assert trained.returncode == ExitCode.CRASHED, trained.stderr[-2000:]
    assert USED_UP in trained.stderr


FULL = """
volumes:
  workspace:
    driver_opts: {type: tmpfs, device: tmpfs, o: "size=64m,uid=1000,gid=1000,mode=0755"}
"""


def test_a_full_volume_ends_the_run_in_one_line_and_it_goes_on_when_there_is_space(
    disturbed: Services, expected: list[tuple[int, str]], tmp_path: Path, removed_afterwards: list[Services]
) -> None:
    (tmp_path / "full.yml").write_text(FULL)
    files = ":".join(("docker-compose.yml", str(tmp_path / "full.yml")))
    run = project(disturbed, "full", RUN_NAME="full", COMPOSE_FILE=files)
    removed_afterwards.append(run)
    # A volume in memory exists only while a container uses it.
    run.compose("run", "--detach", "--rm", "--no-deps", "--entrypoint", "sleep", "data-prep", "infinity")
    started(run, "full")
    fill = ("run", "--rm", "-T", "--no-deps", "--entrypoint", "bash", "data-prep", "-c")
    run.compose(*fill, "cat /dev/zero >/workspace/fill 2>/dev/null || true")
    assert run.wait("train") == 74, said(run)
    assert "no space left on the device" in said(run)
    assert "Traceback" not in said(run)
    run.compose(*fill, "rm /workspace/fill")
    assert finished(run, "full") == expected


def test_a_folder_that_the_services_may_not_write_to_is_named_with_the_user_and_the_setting(
    disturbed: Services, tmp_path: Path, removed_afterwards: list[Services]
) -> None:
    tmp_path.chmod(0o755)
    run = project(disturbed, "readonly", WORKSPACE=f"{tmp_path}/", RUN_UID="54321", RUN_GID="54321")
    removed_afterwards.append(run)
    result = run.compose("run", "--rm", "-T", "data-prep", check=False)
    message = result.stdout + result.stderr
    assert result.returncode in {2, 74}, message
    assert "54321" in message
    assert "WORKSPACE" in message
    assert "Traceback" not in message


@pytest.mark.claim("62", "a text folder with nothing readable, in containers", every=True)
def test_text_that_cannot_be_read_is_not_replaced_by_the_built_in_corpus(
    disturbed: Services, tmp_path: Path, removed_afterwards: list[Services]
) -> None:
    tmp_path.chmod(0o755)
    for name in ("report.pdf", "letter.docx"):
        (tmp_path / name).write_bytes(b"%PDF-1.7\x00\xff")
    run = project(disturbed, "unusable", TEXT_DIR=str(tmp_path))
    removed_afterwards.append(run)
    assert run.compose("up", "--detach", check=False).returncode != 0
    log = said(run, "data-prep")
    assert run.inspect("data-prep")["State"]["ExitCode"] == 3, log
    assert ".pdf" in log
    assert ".docx" in log
    assert run.inspect("train")["State"]["Status"] == "created"


def test_a_text_folder_that_is_a_file_is_named_as_such(disturbed: Services, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    result = disturbed.with_variables(TEXT_DIR=str(tmp_path / "book.txt")).compose("run", "--rm", "-T", "data-prep", check=False)
    assert result.returncode == 3
    assert "TEXT_DIR is a file" in result.stderr


@pytest.mark.claim("60", "another checkout of the same name, and a run beside it, while a run trains", every=True)
def test_neither_another_checkout_of_the_same_name_and_port_nor_a_run_beside_it_touches_a_run(
    disturbed: Services, expected: list[tuple[int, str]], tmp_path: Path, removed_afterwards: list[Services]
) -> None:
    checkouts = []
    for owner in ("alice", "bob"):
        folder = tmp_path / owner / "trainer"
        (folder / "text").mkdir(parents=True)
        copy_compose_files(folder)
        shutil.copy(disturbed.env_file, folder / ".env")
        variables = disturbed.variables | {"TEXT_DIR": "./text", "RUN_NAME": "run"}
        del variables["COMPOSE_PROJECT_NAME"]
        checkouts.append(Services(folder / ".env", variables, folder))
    alice, bob = checkouts
    removed_afterwards += checkouts
    short = {"TRAIN_LIMITS__STEPS": "20", "PREP_ROW_LENGTH": "64", "TRAIN_MODEL__CONTEXT": "64"}

    with socket.create_server(("127.0.0.1", 0)) as other:  # TensorBoard finds its port in use, which does not prevent training
        port = str(other.getsockname()[1])
        first = alice.with_variables(TENSORBOARD_PORT=str(free_port()))
        started(first, "run")
        container = first.inspect("train")["Id"]
        second = bob.with_variables(TENSORBOARD_PORT=port, **short)
        assert "already in use" in second.compose("up", "--detach", check=False).stderr
    beside = first.with_variables(RUN_NAME="beside", TRAIN_LIMITS__STEPS="20")
    assert "weights sha256:" in beside.compose("run", "--rm", "-T", "--no-deps", "train").stdout
    assert second.wait("train") == 0, said(second)
    eventually(lambda: len(first.losses("run")) >= STEPS, 240, "the rest of the first run's steps")
    assert first.inspect("train")["Id"] == container
    assert first.losses("run")[:STEPS] == expected


def test_an_override_file_and_a_file_of_variables_take_effect_beside_what_up_has_written(
    disturbed: Services, tmp_path: Path
) -> None:
    copy_compose_files(tmp_path)
    (tmp_path / "text").mkdir()
    lines = disturbed.env_file.read_text().splitlines()
    (tmp_path / ".env").write_text("".join(f"{line}\n" for line in [*lines, "CUDA_VISIBLE_DEVICES=1"]))
    (tmp_path / "train.env").write_text("NCCL_ALGO=Tree\nTRAIN_SEED=1\nTRAIN_OPTIM__LRR=1\nTRAIN_PRECISION=bf16\n")
    (tmp_path / "docker-compose.override.yml").write_text("services: {train: {environment: {FROM_OVERRIDE: here}}}\n")
    variables = {name: value for name, value in disturbed.variables.items() if name != "COMPOSE_PROJECT_NAME"}
    own = Services(tmp_path / ".env", {**variables, "PET_NPROC_PER_NODE": "2", "TRAIN_SEED": "2"}, tmp_path)
    found = own.compose("config", "train").stdout
    for line in ("CUDA_VISIBLE_DEVICES: ", "NCCL_ALGO: Tree", "FROM_OVERRIDE: here", 'PET_NPROC_PER_NODE: "2"'):
        assert line in found
    for line in ('TRAIN_SEED: "2"', 'TRAIN_OPTIM__LRR: "1"'):  # a setting is that of the shell; a misspelt one reaches the program
        assert line in found
    inside = own.compose("run", "--rm", "-T", "--no-deps", "train", "env").stdout.splitlines()
    assert {"TRAIN_SEED=2", "TRAIN_PRECISION=bf16", "NCCL_ALGO=Tree", "FROM_OVERRIDE=here"} <= set(inside)


@pytest.mark.claim("60", "a second `make up` with another run's name while a run trains", every=True)
def test_a_run_is_not_ended_by_another_up_and_its_log_shows_no_other_container_of_the_image(
    disturbed: Services, tmp_path: Path
) -> None:
    labels = docker("image", "inspect", "--format", "{{json .Config.Labels}}", IMAGE)
    assert "com.docker.compose" not in labels, "env/up built the image with Compose"
    image = f"{IMAGE}-by-compose"
    disturbed.with_variables(IMAGE=image).compose("build", timeout_s=600)
    run = started(disturbed, "watched", 1)
    container = run.inspect("train")["Id"]
    log = tmp_path / "log"
    with log.open("w") as file:
        command = ["docker", "compose", "--env-file", str(run.env_file), "logs", "--follow"]
        follower = subprocess.Popen(command, cwd=ROOT, env=run.variables, stdout=file, stderr=file)
        try:
            eventually(lambda: "train-1" in log.read_text(), 60, "the log of train")
            docker("run", "--rm", "--entrypoint", "bash", image, "-c", "for _ in 1 2 3 4; do echo a stranger; sleep 0.5; done")
            second = subprocess.run(
                [ROOT / "env/up", "--detach"],
                env={**run.variables, "RUN_NAME": "second"},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            seen = len(run.losses("watched"))
            eventually(lambda: len(run.losses("watched")) > seen, 120, "more steps")
        finally:
            follower.kill()
            follower.wait()
    assert second.returncode == 1, second.stdout + second.stderr
    assert "the run 'watched' is training" in second.stderr
    assert "with other settings (RUN_NAME TRAIN_RUN)" in second.stderr
    assert run.inspect("train")["Id"] == container
    run.compose("kill", "train")
    assert "a stranger" not in log.read_text()
