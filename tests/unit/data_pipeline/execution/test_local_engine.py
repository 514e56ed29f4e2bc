import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.command_line import stop_on_signals
from common.errors import SourceError, StoppedBySignal, WorkerError
from data_pipeline.execution import local_engine
from data_pipeline.execution.local_engine import open_engine
from tests.support.runs import ROOT


def slow_first(number: int) -> int:
    time.sleep(0.2 if number == 0 else 0)
    return number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise SourceError("number three is bad")
    return number


def die_at_three(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("num_workers", [1, 2])
def test_results_come_in_the_order_of_the_tasks(num_workers: int) -> None:
    with open_engine(num_workers) as engine:
        assert list(engine.map(slow_first, range(20))) == list(range(20))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_of_a_task_is_raised_where_its_result_is_taken(num_workers: int) -> None:
    with open_engine(num_workers) as engine:
        results = engine.map(fail_at_three, range(6))
        assert [next(results) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(SourceError, match="number three is bad"):
            next(results)


def test_the_workers_do_not_run_the_program_again(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from data_pipeline.execution.local_engine import open_engine\n"
        "with open_engine(2) as engine:\n"
        "    print('once', list(engine.map(abs, range(4))), __file__, __spec__)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"once [0, 1, 2, 3] {script} None\n"), done.stderr


def test_a_killed_worker_is_an_error_with_a_remedy() -> None:
    with open_engine(2) as engine, pytest.raises(WorkerError, match=r"lack of memory; .* fewer --workers"):
        list(engine.map(die_at_three, range(6)))


def test_a_worker_that_the_kernel_killed_for_lack_of_memory_is_reported_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for the cgroup counts one kill while the workers run."""
    counts = iter((2, 3))
    monkeypatch.setattr(local_engine, "num_oom_kills", lambda: next(counts))
    monkeypatch.setattr(local_engine, "why_killed", lambda before: "the memory limit is used up" if next(counts) > before else "")
    with open_engine(2) as engine, pytest.raises(WorkerError, match=r"killed: the memory limit is used up; .* fewer --workers"):
        list(engine.map(die_at_three, range(6)))


def run_out_of_memory(_: int) -> None:
    raise MemoryError


@pytest.mark.parametrize("num_workers", [1, 2])
def test_lack_of_memory_is_an_error_with_a_remedy(num_workers: int) -> None:
    with open_engine(num_workers) as engine, pytest.raises(WorkerError, match=r"memory ran out.* fewer --workers"):
        list(engine.map(run_out_of_memory, range(3)))


def test_tasks_are_taken_only_as_far_ahead_as_workers_need() -> None:
    taken: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    with open_engine(2) as engine:
        next(engine.map(slow_first, tasks()))
        assert taken == [0, 1, 2, 3]


def test_sigterm_becomes_an_error_that_says_how_to_go_on_and_the_old_handler_returns() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(StoppedBySignal, match=r"SIGTERM received; .* run the same command again"), stop_on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
