"""Two ranks under the entrypoint. One is killed, stopped or blocked, or the launcher dies. The group is ended and started again.

A run that was interrupted in any of these ways ends with the losses of an uninterrupted run.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.claims import noted, tried
from tests.support.faults import count, first_seed, seeds
from tests.support.prepared import write_prepared
from tests.support.runs import losses, metrics, tiny_config, wait_for_step
from tests.support.two_ranks import all_ended, log, parent_of, pids_of, seconds_until, started
from trainer.config import TrainConfig
from trainer.distributed.stragglers import OwnTime, StragglerDetector

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

STEPS = 20
STALL_S = 2
SLOW_S = 30
"""Seconds that a rank may take while it loads or saves. A signal may also hit a rank in these phases."""
STEP_S = 0.05

PACE = f"""
import time
def on_step_end(run, metrics):
    time.sleep({STEP_S})
"""

SLOW = """
import time
def on_step_end(run, metrics):
    time.sleep(0.3 if run.rank == 1 else 0.1)
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
import trainer.data.loader
def on_train_start(run):
    read = trainer.data.loader.global_batch
    def blocking(rows, order, config, group, position, **options):
        if run.rank == 1 and position >= 6 * config.global_batch_size and not Path("{once}").exists():
            Path("{once}").touch()
            threading.Event().wait()
        return read(rows, order, config, group, position, **options)
    trainer.data.loader.global_batch = blocking
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run without interruption. One of its ranks is slow."""
    config = configuration(data, tmp_path_factory.mktemp("runs"), SLOW)
    with started(config) as train:
        assert train.wait(120) == 0, log(config)
    return config


def configuration(data: Path, folder: Path, extension: str, **changes: object) -> TrainConfig:
    """Return a run whose extension is `extension`. `{once}` in its code is replaced by the path of a file that it can create."""
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
        **{"watchdog": {"stall_s": STALL_S, "slow_s": SLOW_S}} | changes,
    )


def a_rank(config: TrainConfig, draw: random.Random) -> int:
    return draw.choice(pids_of(config))


def the_launcher(config: TrainConfig, _: random.Random) -> int:
    return parent_of(pids_of(config)[0])


Choice = Callable[[TrainConfig, random.Random], int]


def strike(config: TrainConfig, seed: int, choose: Choice, number: signal.Signals) -> tuple[list[int], int]:
    """Send a signal at a random moment after the fourth step. Return the processes of the ranks, and the one that was hit."""
    draw = random.Random(seed)
    wait_for_step(config.run, draw.randrange(4, STEPS - 5))
    time.sleep(draw.uniform(0, STEP_S))
    pids, struck = pids_of(config), choose(config, draw)
    os.kill(struck, number)
    return pids, struck


@pytest.mark.parametrize(
    ("choose", "within_s"),
    [
        pytest.param(a_rank, 30, marks=pytest.mark.claim("21", "kill -9 of one rank", unit="runs")),
        pytest.param(the_launcher, 20, marks=pytest.mark.claim("22", "kill -9 of torchrun's agent", unit="runs")),
    ],
)
def test_after_the_death_of_a_rank_or_of_the_launcher_all_ranks_end_and_the_run_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig, choose: Choice, within_s: float
) -> None:
    slowest_s = 0.0
    for seed in seeds(1, 40):
        config = configuration(data, tmp_path / str(seed), PACE)
        with started(config) as train:
            pids, struck = strike(config, seed, choose, signal.SIGKILL)
            took_s = seconds_until(partial(all_ended, pids), within_s)
            slowest_s = max(slowest_s, took_s)
            assert train.wait(120) == 0, log(config)
            if choose is a_rank:
                assert f"error: signal 9 (SIGKILL) ended rank {pids.index(struck)} (process {struck}): another process" in log(
                    config
                )
            assert not [words for words in ("GLHF", "trainer FAILED", "Root Cause") if words in log(config)]
        assert losses(config.run) == losses(uninterrupted.run)
        assert log(config).count("starting again from the newest checkpoint") == 1
    noted(f"all ranks gone after {slowest_s:.1f} s at most, resumes exact")


UNBOUND = """
import ctypes, time
def on_train_start(run):
    ctypes.CDLL(None).prctl(1, 0)
def on_step_end(run, metrics):
    time.sleep(0.5)
"""


@pytest.mark.broken("22", "ranks without a parent-death signal")
def test_ranks_that_the_kernel_does_not_end_with_their_launcher_live_on(data: Path, tmp_path: Path) -> None:
    config = configuration(data, tmp_path / "run", UNBOUND, watchdog={"enabled": "off"})
    with started(config, TRAIN_MAX_RESTARTS="0"):
        pids, _ = strike(config, 0, the_launcher, signal.SIGKILL)
        time.sleep(2)
        assert not all_ended(pids)
        end_all(pids)


@pytest.mark.broken("23", "watchdog off")
def test_without_the_watchdog_a_stopped_rank_keeps_the_group_for_ever(data: Path, tmp_path: Path) -> None:
    config = configuration(data, tmp_path / "run", PACE, watchdog={"enabled": "off"})
    with started(config, TRAIN_MAX_RESTARTS="0"):
        pids, _ = strike(config, 0, a_rank, signal.SIGSTOP)
        time.sleep(4 * STALL_S)
        assert not any(all_ended([pid]) for pid in pids)
        end_all(pids)


def end_all(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.claim("23", "SIGSTOP of a rank", unit="runs")
def test_a_stopped_rank_is_named_and_the_run_goes_on_to_the_same_bits(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig
) -> None:
    slowest_s = 0.0
    for seed in seeds(1, 20):
        config = configuration(data, tmp_path / str(seed), PACE)
        with started(config) as train:
            pids, stopped = strike(config, seed, a_rank, signal.SIGSTOP)
            took_s = seconds_until(partial(all_ended, pids), 60)
            slowest_s = max(slowest_s, took_s)
            assert train.wait(120) == 0, log(config)
        assert f"error: rank {pids.index(stopped)} (process {stopped}, stopped by a signal) has made no progress" in log(config)
        for rank, pid in enumerate(pids):
            stacks = (config.run / f"stacks/rank-{rank}.txt").read_text()
            assert f"rank {rank}, process {pid}, step" in stacks
            assert "in train_until_done\n" in stacks
        assert losses(config.run) == losses(uninterrupted.run)
    noted(f"all ranks gone after {slowest_s:.1f} s at most, of which {STALL_S} s are allowed, {SLOW_S} s in a save; resumes exact")


STUCK = [
    pytest.param(READER_BLOCKS, 7, "data", "blocking", id="reader"),
    pytest.param(HOLDS_THE_LOCK, 6, "report", "on_step_end", id="lock"),
]


@pytest.mark.claim("23", "interpreter's lock held, or data reader blocked", unit="runs")
@pytest.mark.parametrize(("extension", "step", "phase", "function"), STUCK[: count(1, 2)])
def test_a_rank_that_is_stuck_is_named_with_its_phase_and_the_run_goes_on(
    data: Path, tmp_path: Path, uninterrupted: TrainConfig, extension: str, step: int, phase: str, function: str
) -> None:
    config = configuration(data, tmp_path, extension)
    with started(config) as train:
        assert train.wait(120) == 0, log(config)
    assert "error: rank 1 (process " in log(config)
    assert f"in phase {phase} of step {step} (limit {STALL_S} s)" in log(config)
    assert "the ranks ended (rank 1 (process " in log(config)
    assert f" in {function}\n" in (config.run / "stacks/rank-1.txt").read_text()
    assert losses(config.run) == losses(uninterrupted.run)


@pytest.mark.claim("24", "one rank three times slower than the other", unit="runs")
def test_a_slow_rank_is_named_within_20_steps_and_training_goes_on(data: Path, tmp_path: Path, uninterrupted: TrainConfig) -> None:
    runs = [uninterrupted]
    for number in range(count(0, 9)):
        runs.append(configuration(data, tmp_path / str(number), SLOW))
        with started(runs[-1]) as train:
            assert train.wait(120) == 0, log(runs[-1])
    tried(len(runs))
    for config in runs:
        (alert,) = [alert for alert in metrics(config.run, "alert") if alert["rule"] == "slow_rank"]
        assert alert["step"] <= 20
        assert ": rank 1 is slow: " in alert["message"]
        assert "most of the difference in compute;" in alert["message"]
        assert alert["message"] in log(config)
        assert "made no progress" not in log(config)
        assert losses(config.run) == losses(uninterrupted.run)
        assert len(losses(config.run)) == STEPS


@pytest.mark.claim("24", "ranks that are only uneven: no alarm", unit="steps")
def test_in_uneven_steps_no_rank_is_called_slow() -> None:
    generator = np.random.default_rng(first_seed())
    detector, num_steps = StragglerDetector(), count(10_000, 1_000_000)
    tried(num_steps)
    for _ in range(num_steps):
        own = 0.1 * generator.lognormal(0, 0.3, 4)
        assert detector.observe([OwnTime(float(seconds), 0.0) for seconds in own], float(own.max()) + 0.1) is None
