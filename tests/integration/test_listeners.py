"""On one node no process of a run can be reached from another machine: every listening socket is on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from common.errors import ExitCode
from tests.support.network import Listener, foreign_address, listeners, loopback_only, plant_command, reachable
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, losses, start_torchrun, tiny_config, wait_for_step
from tests.support.two_ranks import all_ended, descendants, log, ranks_of, seconds_until, started
from trainer.config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

PACE = """
import time
def on_step_end(run, metrics):
    time.sleep(0.2)
"""
DIES_ONCE = """
import os
def on_step_end(run, metrics):
    if run.rank == 1 and metrics.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(9)
"""
KUBEFLOW_WITH_ONE_NODE = {
    "PET_NNODES": "1",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": foreign_address(),
    "PET_MASTER_PORT": "29400",
    "GLOO_SOCKET_IFNAME": "eth0",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def of_two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(data, tmp_path_factory.mktemp("runs") / "run")
    assert start_torchrun(config, 2, GLOO_SOCKET_IFNAME="").wait(120) == 0
    return config


def replay(config: TrainConfig) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "verify", str(config.run), "--replay", "12", "--from", "0"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def slow_run(data: Path, folder: Path) -> TrainConfig:
    """Return a run that lasts long enough to be inspected."""
    (folder / "extension.py").write_text(PACE)
    last = {"limits": {"steps": 300}, "schedule": {"warmup_steps": 3, "decay_steps": 300}}
    return tiny_config(data, folder / "run", extension=folder / "extension.py", **last)


def listeners_until_the_end(process: subprocess.Popen[str]) -> dict[int, list[Listener]]:
    """Return all sockets on which a process or its descendants listened, checked many times per second until it ends."""
    found: dict[int, list[Listener]] = {}
    while process.poll() is None:
        found |= listeners([process.pid, *descendants(process.pid)])
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("variables", [{}, KUBEFLOW_WITH_ONE_NODE], ids=["no variables", "a scheduler's variables"])
def test_a_training_on_one_node_cannot_be_reached_and_runs_no_code_of_a_stranger(
    data: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    config, mark = slow_run(data, tmp_path), tmp_path / "mark"
    with started(config, **variables) as train:
        wait_for_step(config.run, 2)
        found = listeners([train.pid, *descendants(train.pid)])
        assert len(ranks_of(train.pid)) == 2
        open_ports = reachable(foreign_address(), {port for each in found.values() for _, port in each})
        planted = [plant_command(foreign_address(), port, mark) for port in open_ports]
        if any(planted):
            time.sleep(10)  # the agent checks every 5 s
    assert not mark.exists(), "a stranger's command was run"
    assert open_ports == []
    assert found, "no listening socket of the ranks was found"
    assert loopback_only(found), found


def test_the_ranks_meet_in_a_folder_of_their_user_that_goes_with_them(data: Path, tmp_path: Path) -> None:
    config, temporary = slow_run(data, tmp_path), tmp_path / "tmp"
    temporary.mkdir()
    with started(config, TMPDIR=str(temporary)):
        wait_for_step(config.run, 2)
        (store,) = temporary.glob("trainer.*/ranks-*/attempt-0")
        assert [path.stat().st_mode & 0o777 for path in store.parents[:2]] == [0o700, 0o700]
    assert not list(temporary.glob("trainer.*"))


def test_a_replay_on_two_ranks_cannot_be_reached(of_two_ranks: TrainConfig) -> None:
    process = replay(of_two_ranks)
    found = listeners_until_the_end(process)
    assert "bitwise equal: 12 steps" in process.communicate()[0]
    assert found, "no listening socket of the ranks was found"
    assert loopback_only(found), found


def test_a_replay_leaves_no_process_behind_when_it_is_killed(of_two_ranks: TrainConfig) -> None:
    process = replay(of_two_ranks)

    def joined() -> list[int]:
        found = listeners(descendants(process.pid))
        return [pid for pid in found if b"torch" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    seconds_until(lambda: len(joined()) == 2, 60)
    everything = descendants(process.pid)
    os.kill(joined()[-1], signal.SIGSTOP)  # so that the replay does not end by itself
    process.kill()
    process.communicate()
    try:
        seconds_until(lambda: all_ended(everything), 30)
    finally:
        for pid in everything:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_preparation_listens_nowhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--recipe", "smoke", "--sources", "builtin", "--workers", "2"]
    process = subprocess.Popen([*command, "--output", str(tmp_path / "data")], cwd=ROOT, stdout=subprocess.DEVNULL, text=True)
    found = listeners_until_the_end(process)
    assert (process.returncode, found) == (0, {})


def test_torchrun_started_by_hand_warns_that_others_can_reach_it(of_two_ranks: TrainConfig) -> None:
    """It uses the rendezvous of torch, which opens before the trainer is loaded."""
    warning = "torchrun was started by hand: its rendezvous listens on all network interfaces"
    assert log(of_two_ranks).count(warning) == 1


def test_ranks_that_torchrun_starts_again_meet_anew(data: Path, tmp_path: Path) -> None:
    (tmp_path / "extension.py").write_text(DIES_ONCE)
    config = tiny_config(data, tmp_path / "run", extension=tmp_path / "extension.py")
    with started(config, PET_MAX_RESTARTS="1", TRAIN_MAX_RESTARTS="0") as train:
        assert train.wait(120) == ExitCode.DONE, log(config)
    assert [step for step, _ in losses(config.run)][-1] == 12


def test_two_nodes_meet_as_torchrun_has_them(data: Path, tmp_path: Path) -> None:
    config = tiny_config(data, tmp_path / "run")
    nodes = []
    for node in range(2):
        variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "29417"}
        nodes.append(started(config, CPU_RANKS="1", GLOO_SOCKET_IFNAME="lo", **variables))
    with nodes[0] as first, nodes[1] as second:
        assert (first.wait(120), second.wait(120)) == (0, 0), log(config)
    assert "public address" not in log(config)
