"""A node notices that the torchrun of the first node has ended, and one line says which rank has failed."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.runs import ROOT
from trainer.launch.agent import wait_for_end
from trainer.launch.ranks import Failure, describe

ABSENT_S = 0.2


def test_the_wait_lasts_until_the_other_process_closes_the_connection_and_resets_do_not_end_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        waiting = threading.Thread(target=wait_for_end, args=(*store.getsockname(), ABSENT_S), daemon=True)
        waiting.start()
        for _ in range(2):
            connection, _ = store.accept()
            waiting.join(2 * ABSENT_S)
            assert waiting.is_alive()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
            connection.close()
        again, _ = store.accept()
        again.close()  # in order, while a successor still listens
        waiting.join(60)
        assert not waiting.is_alive()


def test_the_wait_is_over_after_its_time_if_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        address = store.getsockname()
    wait_for_end(*address, ABSENT_S)


def test_a_port_in_use_ends_the_launcher_of_several_nodes_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        nodes = {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": str(port)}
        words = ["--run", str(tmp_path / "run"), "--data", str(tmp_path / "data"), "--limits.steps", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "trainer.launch", "train", *words],
            cwd=ROOT,
            env={**os.environ, **nodes},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 1
    first, line = done.stderr.splitlines()
    assert first.startswith("train: starting ranks")
    assert line.startswith(f"error: localhost:{port}: another program uses this port")
    assert "PET_MASTER_PORT" in line


@pytest.mark.parametrize(
    ("codes", "why", "said"),
    [
        ({0: 1, 1: -9}, "the limit of 1.0 GB is used up", "signal 9 (SIGKILL) ended rank 1 (process 101): the limit of 1.0 GB"),
        ({0: 1, 1: -9}, "", "signal 9 (SIGKILL) ended rank 1 (process 101): another process sent it"),
        ({0: -15, 2: -11}, "the memory limit of 1.0 GB is used up", "signal 15 (SIGTERM) ended rank 0 (process 100)"),
        ({0: 1, 1: 1}, "", ""),
        ({3: 134}, "", "rank 3 (process 103) ended with exit code 134; its message is above"),
    ],
)
def test_the_rank_that_failed_first_is_named_in_one_line_with_the_reason_of_a_kill(
    codes: dict[int, int], why: str, said: str
) -> None:
    failures = {rank: Failure(100 + rank, code, number) for number, (rank, code) in enumerate(codes.items())}
    line = describe(failures, why)
    assert line.startswith(said)
    assert bool(line) == bool(said)
    assert "\n" not in line
    assert ("used up" in line) == (why != "" and -9 in codes.values())
