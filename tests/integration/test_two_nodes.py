"""A run on two nodes, each a launcher with torchrun and one rank, which meet over loopback. The test is the scheduler."""

from __future__ import annotations

import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.errors import ExitCode
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from tests.support.signalled import Nodes, Place, running
from tests.support.two_ranks import seconds_until
from trainer.config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

STEPS = 24
LONG_S = 150
PACE = """
import time
import trainer.distributed.group
trainer.distributed.group.WAIT_S = 1.0
def on_step_end(run, metrics):
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Bench:
    """Data, and the last line of a run of two ranks on one node."""

    folder: Path
    weights: str = ""

    def config(self, name: str, **changes: Any) -> TrainConfig:
        (self.folder / "extension.py").write_text(PACE)
        settings: dict[str, Any] = {
            "extension": self.folder / "extension.py",
            "limits": {"steps": STEPS},
            "schedule": {"decay_steps": STEPS},
            "eval": {"every_steps": 100, "sample_tokens": 0},
            "watchdog": {"stall_s": 3, "slow_s": 60},
        }
        return tiny_config(self.folder / "data", self.folder / name, **settings | changes)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("nodes"))
    write_prepared(bench.folder / "data")
    config = bench.config("one-node")
    with running(config, 1) as node:
        assert codes_of(node) == [ExitCode.DONE], node.log(0)
        return Bench(bench.folder, node.weights())


def codes_of(nodes: Nodes) -> list[int]:
    """Wait for the end of the run and return the exit code of each node."""
    return [launcher.wait(LONG_S) for launcher in nodes.launchers]


def wait_for_step(nodes: Nodes, step: int) -> None:
    seconds_until(lambda: nodes.reported() >= step or nodes.over(), LONG_S)
    assert not nodes.over(), nodes.log(0) + nodes.log(1)


def finished(config: TrainConfig) -> str:
    """Start both nodes again, as a scheduler does, and return the last line of the run."""
    with running(config, 2) as nodes:
        assert codes_of(nodes) == [ExitCode.DONE] * 2, nodes.log(0) + nodes.log(1)
        assert "resuming " in nodes.log(0)
        return nodes.weights()


def test_a_signal_to_one_node_stops_both_and_both_resume_to_the_bits_of_a_run_on_one_node(bench: Bench) -> None:
    config = bench.config("stopped")
    with running(config, 2) as nodes:
        wait_for_step(nodes, 4)
        nodes.launchers[1].terminate()
        assert codes_of(nodes) == [ExitCode.STOPPED] * 2, nodes.log(0) + nodes.log(1)
    assert finished(config) == bench.weights


def test_the_death_of_a_rank_ends_both_nodes_with_1_and_both_resume_to_the_same_bits(bench: Bench) -> None:
    config = bench.config("killed")
    with running(config, 2) as nodes:
        wait_for_step(nodes, 8)
        [rank] = nodes.members(1, "rank", random.Random(0))
        os.kill(rank, signal.SIGKILL)
        assert codes_of(nodes) == [ExitCode.CRASHED] * 2, nodes.log(0) + nodes.log(1)
    assert finished(config) == bench.weights


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_is_killed_and_started_again_meets_the_other_one_which_waits_for_it(bench: Bench, killed: int) -> None:
    elastic: dict[str, Any] = {"reproducibility": "elastic", "checkpoint": {"every_steps": 4}}
    with running(bench.config(f"elastic-{killed}", **elastic), 1, CPU_RANKS="1") as node:
        assert codes_of(node) == [ExitCode.DONE], node.log(0)
        expected = node.weights()
    config = bench.config(f"restarted-{killed}", **elastic)
    with running(config, 2, TRAIN_MAX_RESTARTS="3", TRAIN_RESTART_DELAY_S="1") as nodes:
        wait_for_step(nodes, 5)
        for process in nodes.members(killed, "node", random.Random(0)):
            os.kill(process, signal.SIGKILL)
        nodes.launchers[killed].wait()
        nodes.start_again(killed)
        assert [launcher.wait(2 * LONG_S) for launcher in nodes.launchers] == [ExitCode.DONE] * 2, nodes.log(0) + nodes.log(1)
        assert "resuming " in nodes.log(0)
        assert "starting again from the newest checkpoint" in nodes.log(1 - killed)
        assert nodes.weights() == expected


def test_a_rank_that_is_stuck_is_named_by_its_node_and_the_healthy_rank_of_the_other_node_is_not_blamed(bench: Bench) -> None:
    config = bench.config("frozen")
    with running(config, 2) as nodes:
        wait_for_step(nodes, 8)
        [rank] = nodes.members(1, "rank", random.Random(0))
        os.kill(rank, signal.SIGSTOP)
        assert codes_of(nodes) == [ExitCode.CRASHED] * 2, nodes.log(0) + nodes.log(1)
        assert f"error: rank 1 (process {rank}, stopped by a signal) has made no progress for " in nodes.log(1)
        assert "error: rank 0 (process" not in nodes.log(0)
    assert finished(config) == bench.weights


def test_nodes_with_run_folders_of_their_own_are_refused_before_anything_is_trained(bench: Bench, tmp_path: Path) -> None:
    config = bench.config("not-shared")
    elsewhere = bench.config(f"{tmp_path}/own")
    with running(config, 2, places=(Place(), Place(elsewhere))) as nodes:
        assert codes_of(nodes) == [ExitCode.CONFIG] * 2, nodes.log(0) + nodes.log(1)
        assert f"error: {elsewhere.run} on this node (" in nodes.log(1)
        assert "mount it at the same path on every node" in nodes.log(1)
        assert "error: a rank on another node ended the run; see the log of that node for the reason" in nodes.log(0)
    assert not elsewhere.run.exists()
    assert not list(config.run.glob(".shared-*"))


@pytest.mark.parametrize("other", ["other rows", "missing"])
def test_nodes_with_different_data_are_refused(bench: Bench, tmp_path: Path, other: str) -> None:
    if other == "other rows":
        write_prepared(tmp_path / "data", seed=1)
    config = bench.config(other)
    elsewhere = config.model_copy(update={"data": tmp_path / "data"})
    with running(config, 2, places=(Place(), Place(elsewhere))) as nodes:
        assert codes_of(nodes) == [ExitCode.DATA] * 2, nodes.log(0) + nodes.log(1)
        assert f"error: {tmp_path / 'data'}" in nodes.log(1)
        assert "error: a rank on another node ended the run" in nodes.log(0)
