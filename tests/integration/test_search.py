"""Whole searches: killed and continued, the best recipe trained again, invalid combinations, stops, and several trials at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import ROOT, losses, run_command
from tests.support.searches import RECIPE, trials_of, words

pytestmark = pytest.mark.optional


def long_recipe(steps: int) -> str:
    """Return a recipe of runs that last for seconds, so that they can be stopped, with few evaluations and saves."""
    return RECIPE.replace("steps = 24", f"steps = {steps}").replace("every_steps = 4", "every_steps = 20")


def killed_once(command: list[str], moment: Callable[[], bool]) -> None:
    """Start a command, and kill its process group once something holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while not moment() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_search_that_was_killed_twice_has_each_trial_once_and_the_same_ones_and_its_best_recipe_trains_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """For random moments see tests/faults/test_searches.py."""
    command = words(tmp_path, "--trials", "3", "--pruner", "none")
    runs = tmp_path / "out" / "runs"
    killed_once(command, (runs / "trial-0000" / "metrics.jsonl").exists)
    killed_once(command, (runs / "trial-0001" / "record.json").exists)
    done = run_command(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    trials = trials_of(tmp_path)
    assert [(trial["trial"], trial["state"]) for trial in trials] == [(number, "finished") for number in range(3)]
    assert sorted(path.name for path in runs.iterdir()) == [f"trial-{number:04d}" for number in range(3)]
    assert done.stdout == f"{tmp_path / 'out' / 'best.toml'}\n"

    (whole := tmp_path / "whole").mkdir()
    (whole / "data").symlink_to(tmp_path / "data")
    assert run_command(*words(whole, "--trials", "3", "--pruner", "none"), OMP_NUM_THREADS="1").returncode == 0
    assert [(one["values"], one["losses"]) for one in trials_of(whole)] == [(one["values"], one["losses"]) for one in trials]

    best = min(trials, key=lambda trial: trial["loss"])
    again = run_command(
        "trainer", "train", "--recipe", str(tmp_path / "out" / "best.toml"), "--run", str(tmp_path / "again"), OMP_NUM_THREADS="1"
    )
    assert again.returncode == 0, again.stderr
    run = tmp_path / "out" / best["run"]
    assert losses(tmp_path / "again") == losses(run)
    assert digest_of(tmp_path / "again") == digest_of(run)


def digest_of(run: Path) -> str:
    weights: str = json.loads((run / "record.json").read_text())["weights"]
    return weights


def test_combinations_that_cannot_be_trained_fail_with_the_reason_and_others_take_their_place(tmp_path: Path) -> None:
    space = "model.heads = {choices = [3, 4]}\nmodel.context = {choices = [16, 32]}\n"
    done = run_command(*words(tmp_path, "--sampler", "grid", space=space))
    assert done.returncode == 0, done.stderr
    found = {(one["values"]["model.heads"], one["values"]["model.context"]): one for one in trials_of(tmp_path)}
    assert {key: one["state"] for key, one in found.items()} == {
        (3, 16): "failed",
        (3, 32): "failed",
        (4, 16): "failed",
        (4, 32): "finished",
    }
    assert "model.width = 32 is not a multiple of model.heads = 3" in found[3, 32]["reason"]
    assert "model.context" in found[4, 16]["reason"]


def test_a_bad_trial_ends_at_an_evaluation_and_its_run_can_be_continued(tmp_path: Path) -> None:
    space = "optim.lr = {choices = [1e-2, 1.1e-2, 1.2e-2, 1.3e-2, 1e-6]}\n"
    command = words(tmp_path, "--sampler", "grid", "--seed", "5", space=space, recipe=long_recipe(400))
    done = run_command(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    last = trials_of(tmp_path)[-1]
    assert last["values"] == {"optim.lr": 1e-6}, "the seed puts it last"
    assert last["state"] == "pruned"
    assert "above the median" in last["reason"]
    record = json.loads((tmp_path / "out" / last["run"] / "record.json").read_text())
    assert record["status"] == "stopped"
    assert run_command(*command, OMP_NUM_THREADS="1").returncode == 0
    assert trials_of(tmp_path)[-1] == last


def test_the_checkpoints_of_the_best_trial_alone_stay_and_the_output_is_a_json_object(tmp_path: Path) -> None:
    space = "optim.lr = {choices = [1e-2, 3e-3, 1e-5]}\n"
    command = words(tmp_path, "--sampler", "grid", "--keep_checkpoints", "best", "--json", space=space)
    done = run_command(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    listed = json.loads((tmp_path / "out" / "trials.json").read_text())
    assert results == {"recipe": str(tmp_path / "out" / "best.toml")} | listed
    assert [trial["state"] for trial in listed["trials"]] == ["finished"] * 3
    runs = {trial["trial"]: tmp_path / "out" / trial["run"] for trial in listed["trials"]}
    assert {number for number, run in runs.items() if (run / "checkpoints").exists()} == {listed["best"]}
    assert all(len(losses(run)) == 24 for run in runs.values())
    again = run_command(*command, OMP_NUM_THREADS="1")
    assert (again.returncode, json.loads(again.stdout)["trials"]) == (0, listed["trials"])


def test_ctrl_c_stops_the_trials_in_order_and_the_same_command_continues(tmp_path: Path) -> None:
    command = words(tmp_path, "--trials", "2", "--parallel", "2", recipe=long_recipe(600))
    with subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        deadline = time.monotonic() + 120
        runs = [tmp_path / "out" / "runs" / f"trial-000{number}" for number in range(2)]
        while time.monotonic() < deadline and not all((run / "metrics.jsonl").exists() for run in runs):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert "0 trials finished or pruned, 2 unfinished; run the same command again to continue" in stderr
    assert [json.loads((run / "record.json").read_text())["status"] for run in runs] == ["stopped"] * 2
    done = run_command(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert [trial["state"] for trial in trials_of(tmp_path)] == ["finished"] * 2


def test_a_damaged_run_is_set_aside_and_its_trial_begins_again(tmp_path: Path) -> None:
    command = words(tmp_path, "--trials", "1", recipe=long_recipe(200))
    run = tmp_path / "out" / "runs" / "trial-0000"
    killed_once(command, (run / "record.json").exists)
    (run / "record.json").write_text("{}")
    done = run_command(*command, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert "trial 0 is repeated" in done.stderr
    assert (tmp_path / "out" / "damaged" / "trial-0000-1").is_dir()
    assert [trial["state"] for trial in trials_of(tmp_path)] == ["finished"]
