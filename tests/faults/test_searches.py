"""Row 66: searches that are killed at random moments end with the trials of an undisturbed search, and leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from common.files import is_unfinished
from tests.support.claims import counted, measured, tried
from tests.support.faults import first_seed, turns
from tests.support.runs import ROOT
from tests.support.searches import RECIPE, trials_of, words
from tests.support.two_ranks import all_ended, descendants, seconds_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

_KILLS_PER_SEARCH = 9
_SMALLEST = (
    RECIPE.replace("width = 32", "width = 16").replace("steps = 24", "steps = 6").replace("every_steps = 4", "every_steps = 2")
)
_SPACE = "model.layers = {choices = [1, 2]}\noptim.lr = {choices = [1e-2, 1e-5, 1e-1]}\n"
_OPTIONS = (
    "--sampler",
    "tpe" if find_spec("optuna") else "grid",
    "--seed",
    "11",
    "--trials",
    "3",
    "--pruner",
    "asha",
    "--prune_from",
    "2",
)
_QUICK = {"OMP_NUM_THREADS": "1", "TRAIN_RESTART_DELAY_S": "0", "GIT_DIR": os.devnull}
_LONG_S = 600.0
_VICTIMS = ("the search", "the search", "everything", "a process of a trial")


@dataclass(frozen=True)
class Undisturbed:
    """A search that ran to its end at once."""

    folder: Path
    seconds: float


def started(folder: Path, flaw: str = "") -> subprocess.Popen[bytes]:
    """Start a search, or continue it. `flaw` is code that breaks the program first."""
    code = f"{flaw}\nimport sys; from trainer.__main__ import start; start(sys.argv[1:])"
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *words(folder, *_OPTIONS, space=_SPACE, recipe=_SMALLEST)[1:]],
            cwd=ROOT,
            env=os.environ | _QUICK,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def finished(folder: Path, flaw: str = "") -> Path:
    """Run a search to its end."""
    process = started(folder, flaw)
    try:
        assert process.wait(_LONG_S) == 0, (folder / "log").read_text()[-3000:]
    finally:
        strike(process, "everything", random.Random())
    return folder


def made(folder: Path, data: Path | None = None) -> Path:
    folder.mkdir()
    if data is not None:
        (folder / "data").symlink_to(data)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    folder = made(tmp_path_factory.mktemp("searches") / "undisturbed")
    begun = time.monotonic()
    finished(folder)
    states = [trial["state"] for trial in trials_of(folder)]
    assert set(states) == {"finished", "pruned"}, "both kinds of end are compared"
    return Undisturbed(folder, time.monotonic() - begun)


def strike(process: subprocess.Popen[bytes], victim: str, draw: random.Random) -> bool:
    """Kill a search, with or without its trials, and wait until nothing of it runs. Returns False if it had ended before."""
    everything = [process.pid, *descendants(process.pid)]
    if victim == "a process of a trial" and len(everything) > 1:
        kill([draw.choice(everything[1:])])
        time.sleep(draw.uniform(0, 2))
    alive = process.poll() is None
    everything = [*dict.fromkeys([*everything, *descendants(process.pid)])]
    kill(everything if victim == "everything" else [process.pid])
    process.wait()
    left_s = seconds_until(lambda: all_ended(everything), _LONG_S)
    measured("s until all processes had ended", left_s)
    return alive


def kill(processes: list[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def results(folder: Path) -> dict[str, Any]:
    """Return all that must not depend on kills: trials, best recipe, weights, and names of the files of the search."""
    out, trials = folder / "out", trials_of(folder)
    runs = [out / trial["run"] for trial in trials if trial["state"] == "finished"]
    return {
        "trials": [{name: value for name, value in trial.items() if name != "seconds"} for trial in trials],
        "best": (out / "best.toml").read_text().replace(str(folder), ""),
        "weights": [json.loads((run / "record.json").read_text())["weights"] for run in runs],
        "names": sorted(str(path.relative_to(out)) for path in (*out.iterdir(), *out.glob("*/*"))),
        "unfinished": [str(path.relative_to(out)) for path in out.rglob("*") if is_unfinished(path)],
    }


def disturbed(folder: Path, undisturbed: Undisturbed, draw: random.Random, kills: int, flaw: str = "") -> int:
    """Kill a search again and again, and run it to its end. Returns the number of kills."""
    done = 0
    while done < kills:
        process = started(folder, flaw)
        with suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0, undisturbed.seconds / 2))
        if not strike(process, draw.choice(_VICTIMS), draw):
            break
        done += 1
    finished(folder, flaw)
    return done


@pytest.mark.claim("66", "kill -9 of a search, of all its processes, or of a process of a trial, at a random time", unit="kills")
def test_a_search_that_is_killed_again_and_again_ends_with_the_same_trials_and_leaves_nothing_behind(
    undisturbed: Undisturbed, tmp_path: Path
) -> None:
    left, seed, expected = turns(3, 50), first_seed(), results(undisturbed.folder)
    assert expected["unfinished"] == []
    while left > 0:
        print(f"seed {seed}: set FAULTS_SEED={seed} to start with it")
        folder = made(tmp_path / f"search-{seed}", undisturbed.folder / "data")
        number = disturbed(folder, undisturbed, random.Random(seed), min(left, _KILLS_PER_SEARCH))
        assert results(folder) == expected, (folder / "log").read_text()[-3000:]
        tried(number)
        counted("searches", 1)
        left, seed = left - max(1, number), seed + 1


INTERRUPTED_FAILS = """
from trainer.search.study import Study
def read(self, *arguments, **options):
    Study.found(self, *arguments, **options)
    self._trials[:] = [one.model_copy(update={"state": "failed"}) if one.state == "running" else one for one in self._trials]
Study.found, Study.__init__ = Study.__init__, read
"""


@pytest.mark.broken("66", "a trial that a kill has interrupted counts as failed")
def test_a_search_that_goes_on_with_other_trials_is_noticed(undisturbed: Undisturbed, tmp_path: Path) -> None:
    folder = made(tmp_path / "broken", undisturbed.folder / "data")
    process = started(folder, INTERRUPTED_FAILS)
    seconds_until((folder / "out" / "runs" / "trial-0000" / "record.json").exists, _LONG_S)
    assert strike(process, "everything", random.Random(1))
    finished(folder, INTERRUPTED_FAILS)
    assert results(folder)["trials"] != results(undisturbed.folder)["trials"]
