"""A real engine, the image and running services for the tests marked `containers`."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator

import pytest

from tests.containers.services import IMAGE, PROJECT, ROOT, Services

# Variables that a developer may have set for other runs.
OWN_VARIABLES = (
    *("PREP_", "TRAIN_", "COMPOSE_", "RUN_", "DATA_", "WORKSPACE", "TEXT_DIR", "RECIPE", "TENSORBOARD_", "CPU_RANKS", "GPUS"),
    *("RESTART", "TMP_SIZE", "SHM_SIZE", "NCCL_", "PET_", "CUDA_VISIBLE_DEVICES", "GPU_IDS", "EXTENSIONS_DIR", "MEMORY_LIMIT"),
    *("STOP_GRACE_PERIOD", "JUPYTER_", "NOTEBOOK_"),
)
STEPS_OF_WHOLE = 250
"""Steps of the run `whole`: more than the recipe has, so that a run like it can be stopped in the middle."""


@pytest.fixture(scope="session")
def engine() -> None:
    """Fails if no engine answers. A skip would hide that these tests did not check the containers."""
    try:
        answer = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.fail("docker is not installed; env/install-docker.sh --start")
    if answer.returncode:
        pytest.fail(f"no Docker engine answers (env/install-docker.sh --start): {answer.stderr.strip().splitlines()[-1:]}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="session")
def services(engine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The services on a separate volume, with the image that the script of `make up` builds from this tree."""
    folder = tmp_path_factory.mktemp("services")
    (folder / "text").mkdir()
    env_file = folder / "env"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OWN_VARIABLES)}
    variables = {
        **inherited,
        "COMPOSE_PROJECT_NAME": PROJECT,
        "IMAGE": IMAGE,
        "RECIPE": "smoke",
        "CPU_RANKS": "2",
        "TENSORBOARD_PORT": str(free_port()),
        "TEXT_DIR": str(folder / "text"),
        "ENV_FILE": str(env_file),
    }
    made = subprocess.run(
        [ROOT / "env/up", "--env"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    if made.returncode:
        pytest.fail(f"env/up --env: exit code {made.returncode}\n{made.stdout[-4000:]}\n{made.stderr[-4000:]}")
    result = Services(env_file, variables)
    result.compose("down", "--volumes", "--remove-orphans")
    yield result
    result.compose("down", "--volumes", "--remove-orphans", timeout_s=200)


@pytest.fixture(scope="session")
def first_up(services: Services) -> tuple[Services, str]:
    """`docker compose up` for the run `whole`, which ends by itself. Returns its settings, and the log of both services."""
    run = services.with_variables(
        RUN_NAME="whole", TRAIN_LIMITS__STEPS=str(STEPS_OF_WHOLE), TRAIN_SCHEDULE__DECAY_STEPS=str(STEPS_OF_WHOLE)
    )
    run.compose("up", "--detach", timeout_s=600)
    code = run.wait("train")
    log = run.compose("logs", "--no-log-prefix", "data-prep", "train").stdout
    assert (code, run.inspect("data-prep")["State"]["ExitCode"]) == (0, 0), log[-4000:]
    return run, log


@pytest.fixture(scope="session")
def whole(first_up: tuple[Services, str]) -> Services:
    """The settings of the uninterrupted run `whole`."""
    return first_up[0]


@pytest.fixture(scope="session")
def log_of_whole(first_up: tuple[Services, str]) -> str:
    """What preparation and training have printed."""
    return first_up[1]
