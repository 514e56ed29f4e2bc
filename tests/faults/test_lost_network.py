"""Row 64: the network between two nodes is cut or delayed in the middle of a step.

Each node is in its own network namespace, and a cable connects the two. A cut cable loses packets without closing a
connection, as a failed switch does. The nodes share the run folder, and the test is the scheduler, which starts both nodes again.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import ExitCode
from tests.support.claims import measured
from tests.support.faults import seeds
from tests.support.namespaces import Cable, connected_namespaces, why_not
from tests.support.prepared import write_prepared
from tests.support.runs import losses, metrics, tiny_config
from tests.support.signalled import Nodes, Place, running
from tests.support.two_ranks import seconds_until
from trainer.config import TrainConfig
from trainer.watchdog.watch import OTHER_NODE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs network namespaces of Linux")

STEPS = 24
STALL_S, SLOW_S = 4, 20
ENDING_S = 25
"""Seconds for the stacks, the end of the processes and the end of torchrun, on a busy machine."""
LONG_S = 200
PACE = "import time\ndef on_step_end(run, metrics):\n    time.sleep(0.05)\n"


@pytest.fixture
def cable() -> Iterator[Cable]:
    if reason := why_not():
        pytest.skip(reason)
    with connected_namespaces() as cable:
        yield cable


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = configuration(data, tmp_path_factory.mktemp("runs") / "run")
    with running(config, 1) as node:
        assert node.launchers[0].wait(LONG_S) == 0, node.log(0)
    return config


def configuration(data: Path, run: Path, **changes: Any) -> TrainConfig:
    extension = run.with_name("pace.py")
    extension.parent.mkdir(exist_ok=True)
    extension.write_text(PACE)
    settings: dict[str, Any] = {
        "extension": extension,
        "limits": {"steps": STEPS},
        "schedule": {"decay_steps": STEPS},
        "checkpoint": {"every_steps": 3},
        "eval": {"every_steps": 100, "sample_tokens": 0},
        "watchdog": {"stall_s": STALL_S, "slow_s": SLOW_S},
    }
    return tiny_config(data, run, **settings | changes)


def over(cable: Cable) -> dict[str, Any]:
    """Where the two nodes are started."""
    return {"places": [Place(command=cable.command(node), variables=cable.variables()) for node in range(2)]}


def wait_for_step(nodes: Nodes, draw: random.Random) -> None:
    """Wait until a random moment of a random step."""
    wanted = draw.randrange(4, STEPS - 8)
    seconds_until(lambda: nodes.reported() >= wanted or nodes.over(), LONG_S)
    assert not nodes.over(), nodes.log(0) + nodes.log(1)
    time.sleep(draw.uniform(0, 0.1))


def logs(nodes: Nodes) -> str:
    return nodes.log(0) + nodes.log(1)


@pytest.mark.claim("64", "network between two nodes cut in the middle of a step, and back before the next start", unit="cuts")
def test_a_lost_network_ends_both_nodes_with_a_reason_and_the_next_start_resumes_exactly(
    cable: Cable, data: Path, tmp_path: Path, uninterrupted: TrainConfig
) -> None:
    for seed in seeds(1, 20):
        draw = random.Random(seed)
        config, cut_at = configuration(data, tmp_path / str(seed) / "run"), draw.randrange(2)
        with running(config, 2, **over(cable)) as nodes:
            wait_for_step(nodes, draw)
            cable.cut(cut_at)
            begun = time.monotonic()
            codes = [launcher.wait(LONG_S) for launcher in nodes.launchers]
            measured("s until both nodes had ended", time.monotonic() - begun)
            assert codes == [ExitCode.CRASHED] * 2, logs(nodes)
            assert time.monotonic() - begun < SLOW_S + OTHER_NODE_S + ENDING_S, logs(nodes)
            for node in range(2):
                assert "has made no progress for " in nodes.log(node), logs(nodes)
            assert "the network between the nodes is lost" in logs(nodes)
        cable.mend(cut_at)
        with running(config, 2, **over(cable)) as nodes:
            assert [launcher.wait(LONG_S) for launcher in nodes.launchers] == [ExitCode.DONE] * 2, logs(nodes)
        assert losses(config.run) == losses(uninterrupted.run)


@pytest.mark.claim("64", "network between two nodes delayed in the middle of a step, for less than a step may take", unit="delays")
def test_a_delayed_network_costs_time_and_no_bit(cable: Cable, data: Path, tmp_path: Path, uninterrupted: TrainConfig) -> None:
    for seed in seeds(1, 20):
        draw = random.Random(seed)
        config = configuration(data, tmp_path / str(seed) / "run", watchdog={"stall_s": 30, "slow_s": 60})
        with running(config, 2, **over(cable)) as nodes:
            wait_for_step(nodes, draw)
            delayed = draw.randrange(2)
            cable.cut(delayed)
            before = nodes.reported()
            time.sleep(draw.uniform(0.5, 2.0))
            assert nodes.reported() <= before + 1, "the step did not need the network"
            cable.mend(delayed)
            assert [launcher.wait(LONG_S) for launcher in nodes.launchers] == [ExitCode.DONE] * 2, logs(nodes)
            assert "made no progress" not in logs(nodes)
        assert losses(config.run) == losses(uninterrupted.run)
        assert len(metrics(config.run, "train")) == STEPS


@pytest.mark.broken("64", "watchdog off")
def test_without_the_watchdog_a_lost_network_keeps_both_nodes_waiting(cable: Cable, data: Path, tmp_path: Path) -> None:
    config = configuration(data, tmp_path / "run", watchdog={"enabled": "off"})
    with running(config, 2, **over(cable)) as nodes:
        wait_for_step(nodes, random.Random(0))
        cable.cut(1)
        time.sleep(3 * STALL_S)
        assert not nodes.over()
