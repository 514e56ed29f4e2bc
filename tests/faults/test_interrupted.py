"""Rows 2, 19, 20 and 50: runs of two ranks under the entrypoint that are killed, stopped and frozen repeatedly.

Such a run ends with the losses and the weights of an uninterrupted run, never resumes from an older checkpoint than acknowledged,
and stops correctly when requested.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.support.claims import counted, measured, tried
from tests.support.faults import first_seed, is_full, turns
from tests.support.journal import EXTENSION, FLAWS
from tests.support.nemesis import STRIKES, Nemesis, lost_steps, saved_twice
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from tests.support.two_ranks import log, started
from trainer.config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

STEPS = 160 if is_full() else 80
SAVE_EVERY = 5
STRIKES_PER_RUN = 9
"""Faults per run, as many as row 19 has stop requests in one run: each of `REQUESTS` twice, and the last one, which ends it."""
PACED = {"JOURNAL_PACE_S": "0.02", "JOURNAL_SAVE_S": "0.05", "JOURNAL_EVALUATION_S": "0.1"}
QUICK_END = {"PET_SHUTDOWN_TIMEOUT": "30"}
"""A rank that waits for a dead one while it joins is ended only by torchrun. A rank that is asked to stop while it loads makes a
step first. Ten seconds were too few for that while other tests ran."""

Case = tuple[str, str]
KILLS: list[Case] = [
    ("kill a rank", "in the steps"),
    ("kill everything", "in the steps"),
    ("kill the launcher", "in the steps"),
    ("kill a rank", "during a save"),
    ("kill everything", "at the start"),
    ("kill the launcher", "at the start"),
    ("kill everything", "during a save"),
    ("kill a rank", "at the start"),
]
REQUESTS: list[Case] = [
    ("stop", "at the start"),
    ("stop", "during a save"),
    ("stop", "during an evaluation"),
    ("stop twice", "in the steps"),
]
LAST_REQUEST: Case = ("stop", "in the last step")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    write_prepared(folder / "data")
    (folder / "extension.py").write_text(EXTENSION)
    return folder


def configuration(folder: Path, name: str) -> TrainConfig:
    return tiny_config(
        folder / "data",
        folder / name,
        extension=folder / "extension.py",
        limits={"steps": STEPS},
        schedule={"decay_steps": STEPS},
        checkpoint={"every_steps": SAVE_EVERY},
        eval={"every_steps": 20, "sample_tokens": 0},
        watchdog={"stall_s": 3, "slow_s": 40},
    )


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> TrainConfig:
    config = configuration(folder, "uninterrupted")
    with started(config) as train:
        assert train.wait(300) == 0, log(config)
    return config


@contextmanager
def struck(folder: Path, name: str, seed: int, **environment: str) -> Iterator[Nemesis]:
    nemesis = Nemesis(configuration(folder, name), seed, PACED | QUICK_END | environment)
    try:
        yield nemesis
    finally:
        nemesis.close()


def survived(folder: Path, uninterrupted: TrainConfig, name: str, cases: list[Case]) -> None:
    """Inject the cases into one run after another, and check each finished run. Also records the largest loss of steps."""
    seed = first_seed()
    while cases:
        print(f"seed {seed}: set FAULTS_SEED={seed} to start with it")
        with struck(folder, f"{name}-{seed}", seed) as nemesis:
            for kind, moment in cases[:STRIKES_PER_RUN]:
                if not nemesis.strike(kind, moment):
                    break
            tried(nemesis.num_struck)
            cases = cases[nemesis.num_struck :]
            nemesis.finish()
            assert nemesis.found(uninterrupted) == []
            measured("steps made again after a fault", max(lost_steps(nemesis.journal()), default=0))
            measured("s until all processes were gone", nemesis.longest_s)
        counted("runs", 1)
        seed += 1


@pytest.mark.claim("2", f"kill -9 of a rank, the launcher or all at any time, saves every {SAVE_EVERY} steps", unit="kills")
def test_a_run_that_is_killed_again_and_again_loses_nothing_that_was_acknowledged_and_ends_with_the_same_bits(
    folder: Path, uninterrupted: TrainConfig
) -> None:
    survived(folder, uninterrupted, "killed", list(islice(cycle(KILLS), turns(3, 200))))


FOUND_BY = {
    "optimizer state left out at the restore": ("2", "kill everything", 1),
    "one batch left out at the restore": ("2", "kill everything", 1),
    "overwrites its one checkpoint": ("2", "kill everything", 3),
    "believes a file whatever its digest": ("50", "damage a checkpoint", 3),
}
"""Row, kind of fault, and number of faults for each flaw."""


@pytest.mark.parametrize("flaw", [pytest.param(flaw, marks=pytest.mark.broken(FOUND_BY[flaw][0], flaw)) for flaw in FLAWS])
def test_strikes_find_a_run_that_restores_or_saves_in_a_broken_way(folder: Path, uninterrupted: TrainConfig, flaw: str) -> None:
    _, kind, number = FOUND_BY[flaw]
    with struck(folder, flaw.replace(" ", "-"), 1, JOURNAL_FLAW=flaw, JOURNAL_SAVE_S="0") as nemesis:
        for _ in range(number):
            nemesis.strike(kind, "during a later save")
        nemesis.finish()
        found = nemesis.found(uninterrupted)
    print(found)
    assert found


@pytest.mark.claim("19", "SIGTERM at the start, during a save, during an evaluation, twice, in the last step", unit="stops")
def test_a_stop_on_request_saves_once_ends_with_its_code_and_the_run_goes_on_to_the_same_bits(
    folder: Path, uninterrupted: TrainConfig
) -> None:
    survived(folder, uninterrupted, "stopped", [*(REQUESTS * (2 if is_full() else 1)), LAST_REQUEST] * turns(1, 50))


@pytest.mark.claim("20", "SIGTERM reaches one rank only", unit="stops")
def test_a_signal_that_reaches_one_rank_stops_all_at_one_step(folder: Path, uninterrupted: TrainConfig) -> None:
    survived(folder, uninterrupted, "one-rank", [("stop one rank", "in the steps")] * turns(1, 100))


@pytest.mark.parametrize(
    ("events", "steps"), [("s5 e10 s10 s15", []), ("s10 e10 s10", []), ("s5 s5 e10", [5]), ("e5 s5 s5", [5]), ("s5 e10 s5", [5])]
)
def test_a_step_is_saved_again_only_with_an_evaluation_that_its_first_save_lacked(events: str, steps: list[int]) -> None:
    found = saved_twice([{"event": {"s": "save", "e": "eval"}[one[0]], "step": int(one[1:])} for one in events.split()])
    assert found == [f"step {step} was saved twice" for step in steps]


# Row 50


@pytest.mark.claim("50", "soak: kills, stops, freezes, damaged files of any kind at any time, drawn by a seed", unit="faults")
def test_a_soak_of_random_faults_breaks_no_claim(folder: Path, uninterrupted: TrainConfig) -> None:
    """FAULTS_SOAK_MINUTES sets the duration. A fault is injected only before this time is over."""
    seconds = 60 * float(os.environ.get("FAULTS_SOAK_MINUTES", "120" if is_full() else "0.25"))
    seed = first_seed()
    begun, num_struck, num_lost = time.monotonic(), 0, 0
    while time.monotonic() < begun + seconds:
        print(f"seed {seed}: set FAULTS_SEED={seed} to start with it")
        draw = random.Random(seed)
        with struck(folder, f"soak-{seed}", seed) as nemesis:
            for _ in range(STRIKES_PER_RUN):
                if time.monotonic() > begun + seconds or not nemesis.strike(*any_case(draw)):
                    break
            tried(nemesis.num_struck)
            nemesis.finish()
            assert nemesis.found(uninterrupted) == []
            num_lost += sum(lost_steps(nemesis.journal()))
            num_struck += nemesis.num_struck
        counted("runs", 1)
        seed += 1
    counted("minutes", (time.monotonic() - begun) / 60)
    counted("steps made again", num_lost)
    least_kept = 0.9  # share of all steps that is kept if one fault occurs in every ten saves
    assert not is_full() or num_lost <= num_struck * 10 * SAVE_EVERY * (1 / least_kept - 1)


def any_case(draw: random.Random) -> Case:
    kind = draw.choice(sorted(STRIKES))
    moments = ["in the steps", "after a save", "during a save", "during an evaluation"]
    if kind not in NEED_STARTED:
        moments.append("at the start")
    return kind, draw.choice(moments)


NEED_STARTED = ("stop one rank", "freeze a rank", "tear the logs")
"""Kinds of faults that need running ranks or files of ranks."""
