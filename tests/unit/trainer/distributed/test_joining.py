"""A stop request ends a rank that waits for other ranks, and is never lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ExitCode

ROOT = Path(__file__).resolve().parents[4]
RANK = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})  # before torch starts threads
from torch._C._distributed_c10d import FileStore
from trainer.distributed.joining import stoppable_wait
print("waits", flush=True)
with stoppable_wait(float(sys.argv[2])):
    FileStore(sys.argv[1], 2).wait(["others"])
print("pending", *(number.name for number in signal.sigpending()))
"""
OTHERS = "import sys; from torch._C._distributed_c10d import FileStore; FileStore(sys.argv[1], 2).set('others', 'here')"


def waiting_rank(store: Path, others_s: float) -> subprocess.Popen[str]:
    """Start a rank that waits in C++."""
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, store, str(others_s)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "waits\n"
    return rank


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_the_code_of_a_stop_if_the_others_do_not_come(tmp_path: Path, number: signal.Signals) -> None:
    rank = waiting_rank(tmp_path / "store", 0.2)
    rank.send_signal(number)
    output, errors = rank.communicate(timeout=60)
    assert (rank.returncode, output) == (ExitCode.STOPPED, "")
    assert errors == f"stopped: {number.name} received before all ranks had started; nothing was trained\n"


def test_it_keeps_the_request_if_the_others_come(tmp_path: Path) -> None:
    rank = waiting_rank(tmp_path / "store", 60)
    rank.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    subprocess.run([sys.executable, "-c", OTHERS, tmp_path / "store"], check=True)
    assert rank.communicate(timeout=60) == ("pending SIGTERM\n", "")
    assert rank.returncode == 0
