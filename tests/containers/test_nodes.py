"""Two containers as two nodes: the override `docker-compose.nodes.yml` on a real engine. Recipe `smoke`, no GPU."""

from __future__ import annotations

import json

import pytest

from common.errors import ExitCode
from tests.containers.services import Services, eventually

pytestmark = pytest.mark.containers

BOTH = "docker-compose.yml:docker-compose.nodes.yml"


def weights(services: Services, run: str) -> str:
    """Return the digest of the weights in the record of a run."""
    return str(json.loads(services.read(f"/workspace/runs/{run}/record.json"))["weights"])


SETTINGS = {
    "TRAIN_REPRODUCIBILITY": "elastic",
    "TRAIN_LIMITS__STEPS": "150",
    "TRAIN_CHECKPOINT__EVERY_STEPS": "20",
    "TRAIN_RESTART_DELAY_S": "1",
    "CPU_RANKS": "1",
}


@pytest.fixture(scope="module")
def one_node(services: Services) -> tuple[list[tuple[int, str]], str]:
    """The losses and the weights of an uninterrupted run on one node."""
    one = services.with_variables(RUN_NAME="one-node", **SETTINGS)
    one.compose("up", "--detach", timeout_s=600)
    assert one.wait("train") == ExitCode.DONE, one.compose("logs", "data-prep", "train").stdout[-4000:]
    return one.losses("one-node"), weights(one, "one-node")


@pytest.mark.parametrize("killed", ["train", "node-1"])
def test_a_node_that_is_killed_and_started_again_ends_with_the_bits_of_one_node(
    services: Services, one_node: tuple[list[tuple[int, str]], str], killed: str
) -> None:
    expected, digest = one_node
    run = f"nodes-without-{killed}"
    two = services.with_variables(RUN_NAME=run, COMPOSE_FILE=BOTH, **SETTINGS)
    two.compose("up", "--detach", timeout_s=600)
    eventually(lambda: two.metrics(run, "save"), 240, "a checkpoint of the run on two nodes")
    assert two.compose("exec", "-T", "tensorboard", "ls", f"/workspace/runs/{run}/heartbeat").stdout.split() == ["rank-0", "rank-1"]
    two.compose("kill", killed)
    assert 0 < len(two.losses(run)) < len(expected)
    two.compose("up", "--detach", "--no-deps", killed)

    for name in ("train", "node-1"):
        assert two.wait(name) == ExitCode.DONE, two.compose("logs", name).stdout[-4000:]
    assert two.losses(run) == expected
    assert weights(two, run) == digest
