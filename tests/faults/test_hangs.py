"""Two ranks under the entrypoint, of which one is killed, stopped or stuck, or whose launcher dies: noticed, ended, started again.

A run that was interrupted in any of these ways ends with the losses of one that was not.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.faults import count, seeds
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, arguments, losses, tiny_config, wait_for_step
from trainer.config import TrainConfig
from trainer.watchdog import Beat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")

STEPS = 20
STALL_S = 2
STEP_S = 0.05

PACE = f"""
import time
def on_step_end(run, metrics):
    time.sleep({STEP_S})
"""

SLOW = """
import time
def on_step_end(run, metrics):
    time.sleep(0.12 if run.rank == 1 else 0.04)
"""

HOLDS_THE_LOCK = """
import ctypes, os
from pathlib import Path
def on_step_end(run, metrics):
    if run.rank == 1 and metrics.step == 6 and not Path("{once}").exists():
        Path("{once}").touch()
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""

READER_BLOCKS = """
import threading
from pathlib import Path
import trainer.loader
def on_train_start(run):
    read = trainer.loader.global_batch
    def blocking(rows, order, config, group, position, **options):
        if run.rank == 1 and position >= 6 * config.global_rows and not Path("{once}").exists():
            Path("{once}").touch()
            threading.Event().wait()
        return read(rows, order, config, group, position, **options)
    trainer.loader.global_batch = blocking
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run that nothing ends, though one of its ranks is slow."""
    config = configuration(data, tmp_path_factory.mktemp("runs"), SLOW)
    with started(config) as train:
        assert train.wait(120) == 0, log(config)
    return config


def configuration(data: Path, folder: Path, extension: str) -> TrainConfig:
    """A run with some code called in each step; `{once}` in it is a file that it can make."""
    folder.mkdir(exist_ok=True)
    path = folder / "extension.py"
    path.write_text(extension.format(once=folder / "once"))
    return tiny_config(
        data,
        folder / "run",
        extension=path,
        limits={"steps": STEPS},
        checkpoint={"every_steps": 3},
        eval={"every_steps": 100, "sample_tokens": 0},
        watchdog={"stall_s": STALL_S},
    )


@contextmanager
def started(config: TrainConfig) -> Iterator[subprocess.Popen[bytes]]:
    """The entrypoint with two ranks, which it starts again at once; ended at the end."""
    own = {"PYTHON": sys.executable, "CPU_RANKS": "2", "OMP_NUM_THREADS": "1", "TRAIN_RESTART_DELAY_S": "0"}
    with config.run.with_suffix(".log").open("a") as output:
        process = subprocess.Popen(
            [ROOT / "entrypoints/train", *arguments(config)],
            cwd=ROOT,
            env=os.environ | own,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(70)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def log(config: TrainConfig) -> str:
    return config.run.with_suffix(".log").read_text()


def process_fields(pid: int) -> list[str]:
    """What the kernel knows of a process from its state on; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def all_ended(pids: list[int]) -> bool:
    return all(not (fields := process_fields(pid)) or fields[0] in "ZX" for pid in pids)


def pids_of(config: TrainConfig) -> list[int]:
    beats = [Beat.from_bytes((config.run / f"heartbeat/rank-{rank}").read_bytes()) for rank in range(2)]
    return [beat.pid for beat in beats if beat is not None]


def a_rank(config: TrainConfig, draw: random.Random) -> int:
    return draw.choice(pids_of(config))


def the_launcher(config: TrainConfig, _: random.Random) -> int:
    return int(process_fields(pids_of(config)[0])[1])


Choice = Callable[[TrainConfig, random.Random], int]


def strike(config: TrainConfig, seed: int, choose: Choice, number: signal.Signals) -> tuple[list[int], int]:
    """Sends a signal at a random moment after the fourth step; the processes of the ranks, and the one that was struck."""
    draw = random.Random(seed)
    wait_for_step(config.run, draw.randrange(4, STEPS - 5))
    time.sleep(draw.uniform(0, STEP_S))
    pids, struck = pids_of(config), choose(config, draw)
    os.kill(struck, number)
    return pids, struck


def seconds_until(condition: Callable[[], bool], timeout_s: float) -> float:
    """How long it took; fails where it took too long."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + timeout_s, f"not in {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - begun


@pytest.mark.parametrize(("choose", "within_s"), [(a_rank, 30), (the_launcher, 2)])
def test_after_the_death_of_a_rank_or_of_the_launcher_all_ranks_end_and_the_run_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig, choose: Choice, within_s: float
) -> None:
    for seed in seeds(1, 40):
        config = configuration(data, tmp_path / str(seed), PACE)
        with started(config) as train:
            pids, _ = strike(config, seed, choose, signal.SIGKILL)
            took_s = seconds_until(partial(all_ended, pids), within_s)
            print(f"seed {seed}: all ranks gone after {took_s:.2f} s")
            assert train.wait(120) == 0, log(config)
        assert losses(config.run) == losses(uninterrupted.run)
        assert log(config).count("starting again from the newest checkpoint") == 1


def test_a_stopped_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig
) -> None:
    for seed in seeds(1, 20):
        config = configuration(data, tmp_path / str(seed), PACE)
        with started(config) as train:
            pids, stopped = strike(config, seed, a_rank, signal.SIGSTOP)
            took_s = seconds_until(partial(all_ended, pids), 60)
            print(f"seed {seed}: all ranks gone after {took_s:.2f} s, of which {STALL_S} s are allowed")
            assert train.wait(120) == 0, log(config)
        assert f"error: rank {pids.index(stopped)} (process {stopped}, stopped by a signal) has stood still" in log(config)
        for rank, pid in enumerate(pids):
            stacks = (config.run / f"stacks/rank-{rank}.txt").read_text()
            assert f"rank {rank}, process {pid}, step" in stacks
            assert "in train_until_done\n" in stacks
        assert losses(config.run) == losses(uninterrupted.run)


STUCK = [
    pytest.param(READER_BLOCKS, 7, "data", "blocking", id="reader"),
    pytest.param(HOLDS_THE_LOCK, 6, "report", "on_step_end", id="lock"),
]


@pytest.mark.parametrize(("extension", "step", "phase", "function"), STUCK[: count(1, 2)])
def test_a_rank_that_is_stuck_is_named_with_its_phase_and_the_run_goes_on(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig, extension: str, step: int, phase: str, function: str
) -> None:
    config = configuration(data, tmp_path, extension)
    with started(config) as train:
        assert train.wait(120) == 0, log(config)
    assert "error: rank 1 (process " in log(config)
    assert f"in phase {phase} of step {step}, which may take {STALL_S} s" in log(config)
    assert "the ranks ended (rank 1 (process " in log(config)
    assert f" in {function}\n" in (config.run / "stacks/rank-1.txt").read_text()
    assert losses(config.run) == losses(uninterrupted.run)


def test_a_slow_rank_is_named_within_20_steps_and_training_goes_on(uninterrupted: TrainConfig) -> None:
    (line,) = [line for line in log(uninterrupted).splitlines() if "is slow" in line]
    assert ": rank 1 is slow: " in line
    assert "stood still" not in log(uninterrupted)
    assert len(losses(uninterrupted.run)) == STEPS
