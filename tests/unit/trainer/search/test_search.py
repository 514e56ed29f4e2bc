"""The loop of a search with stand-ins for trainings: which ends of a training are a result, and the names that it writes."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError, ConfigError, ExitCode, GuardError, PreparedDataError, StorageError, WorkerError
from common.files import UnusableFileError, write_atomic
from tests.support.prepared import write_prepared
from trainer.launch.first_failure import LOST_RANK
from trainer.runs.events import AlertEvent, EvalEvent
from trainer.runs.lock import locked_run
from trainer.search import search as searching
from trainer.search.options import TuneOptions
from trainer.search.results import TRIALS
from trainer.search.search import search
from trainer.search.setup import FOLDERS, SETUP
from trainer.search.space import Choices, Space
from trainer.search.study import FILE

_RECIPE = '[train]\ndevice = "cpu"\n[train.model]\nlayers = 1\nwidth = 32\nheads = 4\ncontext = 32\n[train.limits]\nsteps = 30\n'
_SPACE = "optim.lr = {choices = [1e-4, 1e-3, 1e-2]}\n"
_TRAINING = """
import os, sys
from pathlib import Path
run = Path(sys.argv[4])
run.mkdir(exist_ok=True)
(run.parent.parent / "starts").open("a").write(run.name + "\\n")
with (run / "metrics.jsonl").open("a") as metrics:
    metrics.write(sys.argv[5])
print(sys.argv[6], file=sys.stderr, flush=True)
code = int(sys.argv[7])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
_EVALUATION = json.dumps(EvalEvent(30, 2.5, 10).to_json()) + "\n"


def alert(rule: str) -> str:
    return json.dumps(AlertEvent(rule, 3, "critical", "a message", "stop").to_json()) + "\n"


class Trainings:
    """The stand-ins: each trial ends as `ends` says for it, and otherwise well."""

    def __init__(self) -> None:
        self.ends: dict[str, tuple[str, str, int]] = {}
        """Metrics, output and exit code by the name of a trial; a negative code is a signal."""

    def command(self, words: list[str]) -> list[str]:
        metrics, output, code = self.ends.get(Path(words[3]).name, (_EVALUATION, "", 0))
        return [sys.executable, "-Sc", _TRAINING, *words, metrics, output, str(code)]


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainings]:
    found = Trainings()
    monkeypatch.setattr("trainer.search.trial_run.training_command", found.command)
    monkeypatch.setattr("trainer.search.trial_run._FREE_S", 0.2)
    monkeypatch.setattr("trainer.search.results.best_recipe", lambda *_: "[train]\n")
    monkeypatch.setattr(searching, "_POLL_S", 0.01)
    monkeypatch.setattr("trainer.launch.stop_request.StopRequest.install", lambda _: None)
    return found


def searched(folder: Path, recipe: str = _RECIPE, **changes: Any) -> list[dict[str, Any]]:
    """Run a search over three values of a setting, in a fixed order. Returns its trials."""
    if not (folder / "data").exists():
        write_prepared(folder / "data")
        (folder / "recipe.toml").write_text(recipe)
        (folder / "space.toml").write_text(_SPACE)
    places = {"recipe": str(folder / "recipe.toml"), "space": folder / "space.toml", "data": folder / "data"}
    options = TuneOptions(**{**places, "output": folder / "out", "sampler": "grid"} | changes)
    return search(options, lambda _: None)[1]["trials"]  # type: ignore[no-any-return]


def states(folder: Path) -> list[str]:
    return [json.loads(line)["state"] for line in (folder / "out" / FILE).read_text().splitlines()[1:]]


def results(trials: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(trial["values"], trial["state"], trial["losses"]) for trial in trials]


UNDISTURBED = [
    (values, "finished", {"30": 2.5}) for values in Space({"optim.lr": Choices((1e-4, 1e-3, 1e-2))}).combinations(seed=0)
]
NO_RESULTS = {
    "a full disk": ("", "error: /run: no space left on the device", ExitCode.STORAGE, StorageError, 1),
    "damaged data": ("", "error: a shard is damaged", ExitCode.DATA, PreparedDataError, 1),
    "an alert about the disk": (alert("disk"), "error: a message", ExitCode.GUARD, GuardError, 1),
    "an alert about a lost GPU": (alert("gpu_lost"), "error: a message", ExitCode.GUARD, GuardError, 1),
    "a kill of the launcher": ("", "", -9, WorkerError, 3),
    "kills of a rank until the launcher gives up": ("", "not started again: 3 restarts", ExitCode.CRASHED, WorkerError, 3),
    "a kill of another rank": ("", f"error: rank 0 {LOST_RANK} (reset)", ExitCode.CRASHED, WorkerError, 3),
    "a kill that the launcher names": (
        *("", "error: signal 9 (SIGKILL) ended rank 0 (process 7): out of memory", ExitCode.CRASHED),
        *(WorkerError, 3),
    ),
    "a worker without memory": ("", "error: a worker was killed", ExitCode.WORKER, WorkerError, 3),
    "a stop that this search did not ask for": ("", "stopped: SIGTERM", ExitCode.STOPPED, WorkerError, 3),
    "a Ctrl-C that this search did not pass on": ("", "stopped: interrupted", ExitCode.INTERRUPTED, WorkerError, 3),
    "a signal as a shell reports it": ("", "", 137, WorkerError, 3),
    "a damaged checkpoint": ("", "error: record.json is damaged", ExitCode.CHECKPOINT, CheckpointError, 3),
}


@pytest.mark.parametrize("name", NO_RESULTS)
def test_an_end_that_says_nothing_about_the_values_ends_the_search_and_its_next_start_tries_the_trial_again(
    tmp_path: Path, trainings: Trainings, name: str
) -> None:
    metrics, output, code, error, starts = NO_RESULTS[name]
    trainings.ends["trial-0001"] = metrics, output, code
    for _ in range(2):
        with pytest.raises(error, match=r"^trial 1 ended"):
            searched(tmp_path)
        assert states(tmp_path) == ["finished", "running"]
    assert (tmp_path / "out" / "starts").read_text().split().count("trial-0001") == 2 * starts
    trainings.ends.clear()
    assert results(searched(tmp_path)) == UNDISTURBED


_TRACEBACK_OF_A_RANK = """[rank0]: Traceback (most recent call last):
[rank0]:   File "model.py", line 3, in build
[rank0]:     layer()
[rank0]: ValueError: no such layer
error: rank 0 (process 7) ended with exit code 1; its message is above
============
"""
RESULTS = {
    "values that contradict each other": ("", "error: model.width = 3", ExitCode.CONFIG, "failed", "model.width = 3"),
    "an exception": ("", "Traceback (most recent call last):\nRuntimeError: no", ExitCode.CRASHED, "failed", "RuntimeError: no"),
    "an exception of a rank": (
        *("", _TRACEBACK_OF_A_RANK, ExitCode.CRASHED),
        *("failed", "ValueError: no such layer"),
    ),
    "out of memory on the GPU": ("", "error: step 3: out of memory", ExitCode.CRASHED, "failed", "step 3: out of memory"),
    "no evaluation": ("", "", ExitCode.DONE, "failed", "no evaluation has a finite loss"),
    "a stop of the guard": (_EVALUATION, "error: the loss is 9", ExitCode.GUARD, "pruned", "the guard stopped it: the loss is 9"),
    "an alert about the loss": (
        alert("spike"),
        "error: the loss is 9",
        ExitCode.GUARD,
        "pruned",
        "the guard stopped it: the loss is 9",
    ),
    "an alert about a plateau": (alert("plateau"), "error: flat", ExitCode.GUARD, "pruned", "the guard stopped it: flat"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_an_end_that_follows_from_the_values_is_a_result(tmp_path: Path, trainings: Trainings, name: str) -> None:
    metrics, output, code, state, reason = RESULTS[name]
    trainings.ends["trial-0001"] = metrics, output, code
    trials = searched(tmp_path)
    assert [(trial["state"], trial["reason"]) for trial in trials] == [("finished", ""), (state, reason), ("finished", "")]
    assert (tmp_path / "out" / "starts").read_text().split() == [f"trial-000{number}" for number in range(3)]


def test_a_trial_that_is_always_killed_fails_if_the_user_says_so(tmp_path: Path, trainings: Trainings) -> None:
    trainings.ends["trial-0001"] = "", "", -9
    with pytest.raises(WorkerError, match=r"trial 1 ended 3 times without a result \(exit code -9\).*`--killed fail`"):
        searched(tmp_path)
    assert [trial["state"] for trial in searched(tmp_path, killed="fail")] == ["finished", "failed", "finished"]


def test_an_error_of_an_earlier_start_is_not_taken_for_the_reason(tmp_path: Path, trainings: Trainings) -> None:
    trainings.ends["trial-0001"] = "", "error: no space", ExitCode.STORAGE
    with pytest.raises(StorageError):
        searched(tmp_path)
    trainings.ends["trial-0001"] = "", "", ExitCode.CRASHED
    with pytest.raises(WorkerError, match=r"\(exit code 1\)"):
        searched(tmp_path)


def test_a_trial_whose_run_somebody_else_trains_waits_for_the_next_start(tmp_path: Path, trainings: Trainings) -> None:
    run = tmp_path / "out" / "runs" / "trial-0000"
    trainings.ends["trial-0000"] = "", "error: no space", ExitCode.STORAGE
    with pytest.raises(StorageError):
        searched(tmp_path)
    trainings.ends.clear()
    with locked_run(run), pytest.raises(ConfigError, match=r"trial-0000: process \d+ on .* is training here; wait for it"):
        searched(tmp_path)
    assert states(tmp_path) == ["running"]
    assert [trial["state"] for trial in searched(tmp_path)] == ["finished"] * 3


@pytest.mark.parametrize("number", range(14))
def test_a_disk_that_is_full_at_any_write_of_the_search_changes_no_result(
    tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    left = number

    def full(path: Path, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_atomic(path, data)

    with monkeypatch.context() as patch:
        for module in ("results", "setup", "study", "trial_run"):
            patch.setattr(f"trainer.search.{module}.write_atomic", full)
        with pytest.raises(OSError, match="No space left"):
            searched(tmp_path)
    assert results(searched(tmp_path)) == UNDISTURBED


def test_a_search_without_its_gpus_ends_before_its_first_trial(
    tmp_path: Path, trainings: Trainings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device = cuda, but torch sees no GPU"):
        searched(tmp_path, recipe=_RECIPE.replace('"cpu"', '"cuda"'))
    assert not (tmp_path / "out").exists()


# Names in the folder of a search


@pytest.mark.parametrize("name", [*FOLDERS, "damaged", "runs/trial-0001"])
@pytest.mark.parametrize("kind", ["link", "file", "link to nothing"])
def test_no_link_or_file_is_taken_for_a_folder_of_the_search(tmp_path: Path, trainings: Trainings, name: str, kind: str) -> None:
    trainings.ends["trial-0001"] = "", "error: damaged", ExitCode.CHECKPOINT
    with pytest.raises(CheckpointError):
        searched(tmp_path)
    path, elsewhere = tmp_path / "out" / name, tmp_path / "elsewhere"
    path.rename(tmp_path / "moved") if path.exists() else None
    elsewhere.mkdir()
    path.write_text("mine") if kind == "file" else path.symlink_to(elsewhere if kind == "link" else tmp_path / "nothing")
    with pytest.raises(UnusableFileError, match=f"{name} is a (file|symbolic link)"):
        searched(tmp_path)
    assert list(elsewhere.iterdir()) == []
    assert not (tmp_path / "nothing").exists()


def test_a_run_is_set_aside_under_a_new_name_even_if_links_have_the_first_ones(tmp_path: Path, trainings: Trainings) -> None:
    trainings.ends["trial-0000"] = "", "error: no space", ExitCode.STORAGE
    with pytest.raises(StorageError):
        searched(tmp_path)
    (damaged := tmp_path / "out" / "damaged").mkdir()
    (damaged / "trial-0000-1").symlink_to(tmp_path / "nothing")
    (damaged / "trial-0000-2").mkdir()
    trainings.ends["trial-0000"] = "", "error: damaged", ExitCode.CHECKPOINT
    with pytest.raises(CheckpointError):
        searched(tmp_path)
    assert sorted(path.name for path in damaged.iterdir()) == [f"trial-0000-{number}" for number in range(1, 5)]
    assert list((damaged / "trial-0000-2").iterdir()) == []
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", [SETUP, FILE, TRIALS, "report.html", "best.toml", "recipes/trial-0001.toml"])
def test_unfinished_files_of_a_kill_are_removed_and_links_with_names_of_results_are_replaced(
    tmp_path: Path, trainings: Trainings, name: str
) -> None:
    (mine := tmp_path / "mine.txt").write_text("mine")
    path = tmp_path / "out" / name
    unfinished = path.with_name(f".{path.name}.123.{'0' * 16}.tmp")
    if name == SETUP:  # a kill before the search had a file
        path.parent.mkdir()
        unfinished.touch()
    assert [trial["state"] for trial in searched(tmp_path)] == ["finished"] * 3
    unfinished.touch()
    if name not in (SETUP, FILE):  # these two are read
        path.unlink()
        path.symlink_to(mine)
    assert [trial["state"] for trial in searched(tmp_path)] == ["finished"] * 3
    assert not unfinished.exists()
    assert mine.read_text() == "mine"


def test_a_folder_of_a_search_is_not_searched_for_the_database_of_an_earlier_version(tmp_path: Path, trainings: Trainings) -> None:
    trials = searched(tmp_path)
    os.mkfifo(tmp_path / "out" / "study.db")
    (tmp_path / "out" / "study.db-journal").symlink_to(tmp_path / "data")
    assert searched(tmp_path) == trials
