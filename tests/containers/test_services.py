"""The three services on a real engine, in the order in which a user starts them. Recipe `smoke`, two ranks, no GPU."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.containers.services import ROOT, Services, eventually
from tests.support.faults import seeds

pytestmark = pytest.mark.containers

FILES = """
import hashlib, json, pathlib
files = {}
for path in sorted(pathlib.Path("/workspace").rglob("*")):
    if path.is_file() and "heartbeat" not in path.parts and "tensorboard" not in path.parts:
        files[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
print(json.dumps(files))
"""


def files_on_the_volume(services: Services) -> dict[str, str]:
    return dict(json.loads(services.compose("exec", "-T", "tensorboard", "python", "-", stdin=FILES).stdout))


def evaluations(services: Services, run: str) -> list[tuple[int, str]]:
    return [(line["step"], line["val_loss_hex"]) for line in services.metrics(run, "eval")]


def saved_step(services: Services, run: str) -> int:
    """Return the step of the newest checkpoint on the volume, 0 if there is none."""
    names = services.compose("exec", "-T", "tensorboard", "ls", f"/workspace/runs/{run}/checkpoints", check=False).stdout.split()
    return max((int(name.removeprefix("step-")) for name in names if name.startswith("step-")), default=0)


def test_up_prepares_trains_and_leaves_checkpoints_on_the_volume(whole: Services, log_of_whole: str) -> None:
    assert "root digest sha256:" in log_of_whole
    assert "weights sha256:" in log_of_whole
    files = files_on_the_volume(whole)
    assert "/workspace/data/demo/manifest.json" in files
    assert any(path.startswith("/workspace/runs/whole/checkpoints/") for path in files)
    evals = whole.metrics("whole", "eval")
    assert evals[-1]["val_loss"] < evals[0]["val_loss"]


def test_an_empty_text_folder_means_the_built_in_corpus_and_says_so(log_of_whole: str) -> None:
    assert "no text in /text: the built-in corpus" in log_of_whole


def test_two_ranks_trained(whole: Services) -> None:
    beats = whole.compose("exec", "-T", "tensorboard", "ls", "/workspace/runs/whole/heartbeat").stdout.split()
    assert beats == ["rank-0", "rank-1"]


def test_tensorboard_answers_with_the_scalars_of_the_run(whole: Services) -> None:
    def tags() -> Any:
        runs = whole.tensorboard("/data/plugin/scalars/tags")
        return {(run, tag) for run in runs if "whole" in run for tag in runs[run] if "loss" in tag and "val" not in tag}

    eventually(lambda: whole.inspect("tensorboard")["State"]["Health"]["Status"] == "healthy", 60, "tensorboard is healthy")
    run, tag = sorted(eventually(tags, 60, "a training loss of the run in TensorBoard"))[0]
    steps = {line["step"]: line["loss"] for line in whole.metrics("whole")}

    def points() -> Any:
        found = whole.tensorboard(f"/data/plugin/scalars/scalars?run={run}&tag={tag}")
        return found if found and found[-1][1] == max(steps) else None

    for _, step, value in eventually(points, 60, "the last step's loss in TensorBoard"):
        assert math.isclose(value, steps[step], rel_tol=1e-6)


def test_tensorboard_is_published_on_loopback_alone(whole: Services) -> None:
    published = whole.inspect("tensorboard")["NetworkSettings"]["Ports"]["6006/tcp"]
    assert [address["HostIp"] for address in published] == ["127.0.0.1"]


def test_a_second_up_neither_prepares_nor_trains_again(whole: Services) -> None:
    before = files_on_the_volume(whole)
    whole.compose("up", "--detach")
    assert whole.wait("train") == 0
    assert whole.inspect("data-prep")["State"]["ExitCode"] == 0
    after = files_on_the_volume(whole)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert not {path for path in changed if "/data/" in path or "/checkpoints/" in path or path.endswith("metrics.jsonl")}


def test_a_stopped_run_goes_on_to_the_same_losses(whole: Services) -> None:
    expected = whole.losses("whole")
    stopped = whole.with_variables(RUN_NAME="stopped")
    stopped.compose("up", "--detach")
    some = max(3, len(expected) // 4)
    eventually(lambda: len(stopped.losses("stopped")) >= some, 240, f"{some} steps of the run that is to be stopped")
    beside = stopped.compose("exec", "-T", "train", "bash", "-c", "echo $TRAIN_RUN").stdout
    assert beside == "/workspace/runs/stopped\n"
    stopped.compose("stop", "train")
    state = stopped.inspect("train")["State"]
    assert state["ExitCode"] == 75, stopped.compose("logs", "train").stdout[-3000:]
    assert len(stopped.losses("stopped")) < len(expected)

    stopped.compose("up", "--detach")
    assert stopped.wait("train") == 0, stopped.compose("logs", "train").stdout[-3000:]
    assert stopped.losses("stopped") == expected


@pytest.mark.claim("18", "`docker compose stop` at a random time", unit="stops")
def test_stops_at_random_times_lose_no_step_and_change_no_bit(whole: Services) -> None:
    expected, number = whole.losses("whole"), 0
    evaluated = evaluations(whole, "whole")
    for seed in seeds(2, 100):
        name = f"stops-{number}"
        run = whole.with_variables(RUN_NAME=name)
        run.compose("up", "--detach")
        time.sleep(random.Random(seed).uniform(0, 12))
        run.compose("stop", "train")
        done = run.losses(name)
        print(f"stopped after step {len(done)}")
        code = run.inspect("train")["State"]["ExitCode"]
        finished = evaluations(run, name) == evaluated  # after a stop at the last step, its evaluation may be missing
        assert code == (0 if finished else 75), run.compose("logs", "train").stdout[-3000:]
        assert saved_step(run, name) == len(done)
        assert done == expected[: len(done)]
        number += code == 0
    run.compose("up", "--detach")
    assert run.wait("train") == 0, run.compose("logs", "train").stdout[-3000:]
    assert run.losses(name) == expected
    assert evaluations(run, name) == evaluated


OFFLINE = """
services:
  data-prep: {network_mode: none, environment: {PREP_OUTPUT: /workspace/offline}}
  train: {network_mode: none, environment: {TRAIN_DATA: /workspace/offline}}
"""


def test_preparing_and_training_need_no_network(whole: Services, tmp_path: Path) -> None:
    (tmp_path / "offline.yml").write_text(OFFLINE)
    files = ("docker-compose.yml", str(tmp_path / "offline.yml"))
    offline = whole.with_variables(RUN_NAME="offline", TRAIN_LIMITS__STEPS="20", COMPOSE_FILE=":".join(files))
    log = offline.compose("run", "--rm", "-T", "train").stdout
    assert "weights sha256:" in log
    assert "/workspace/offline/manifest.json" in files_on_the_volume(whole)


def test_health_and_stacks_are_those_of_the_ranks_that_run_in_this_container(whole: Services) -> None:
    run = whole.with_variables(RUN_NAME="healthy", TRAIN_LIMITS__STEPS="100000")
    run.compose("up", "--detach")
    eventually(lambda: run.losses("healthy"), 240, "the first steps")
    inside = ("exec", "-T", "train")
    assert "last heartbeat" in run.compose(*inside, "healthcheck").stdout
    assert run.compose(*inside, "env", "HEARTBEAT_MAX_AGE_S=0", "healthcheck", check=False).stdout.startswith("last heartbeat")
    shown = run.compose(*inside, "train", "stacks").stdout
    assert {f" rank {rank}, process " in shown for rank in (0, 1)} == {True}
    assert "/app/trainer/loop.py" in shown
    beside = ("run", "--rm", "--no-deps", "-T", "train")  # another container that sees the same heartbeats
    other = run.compose(*beside, "healthcheck", check=False)
    assert (other.returncode, "(rank 0: it belongs to another container)" in other.stdout) == (1, True)
    assert run.compose(*beside, "stacks", check=False).returncode == 2
    run.compose("stop", "train")
    assert run.inspect("train")["State"]["ExitCode"] == 75, "the run was stopped by one of these commands"


def test_the_report_is_copied_out_of_the_volume_with_the_command_of_the_documentation(whole: Services, tmp_path: Path) -> None:
    [command] = re.findall(r"`docker compose (cp train:\S+/report\.html \.)`", (ROOT / "docs/containers.md").read_text())
    source = command.split()[1].replace("/runs/demo/", "/runs/whole/")
    whole.compose("cp", source, str(tmp_path))
    assert (tmp_path / "report.html").read_text().startswith("<!")


def test_generate_runs_beside_the_services(whole: Services) -> None:
    command = ("run", "--rm", "-T", "train", "generate", "--prompt", "def main(")
    assert "def main(" in whole.compose(*command).stdout


@pytest.mark.parametrize("way", [{"TRAIN_OPTIM__LR": "-1"}, {"TRAIN_ARGS": "--optim.lr -1"}])
def test_a_setting_in_the_shell_reaches_the_service(whole: Services, way: dict[str, str]) -> None:
    wrong = whole.with_variables(RUN_NAME="wrong", **way)
    result = wrong.compose("run", "--rm", "--no-deps", "-T", "train", check=False)
    assert result.returncode == 2
    message = result.stdout + result.stderr
    assert "lr" in message
    assert "-1" in message
    assert "Traceback" not in message


def test_up_says_which_settings_have_no_effect_and_which_hold_for_one_command(services: Services) -> None:
    variables = {**services.variables, "ENV_FILE": str(services.env_file), "PREP_ROW_LENGTH": "64", "PREP_ROW_LENGHT": "64"}
    said = subprocess.run([ROOT / "env/up", "--env"], env=variables, capture_output=True, text=True, timeout=600, check=True).stderr
    assert "PREP_ROW_LENGHT has no effect" in said
    alone = next(line for line in said.splitlines() if "these settings apply to this command only: " in line)
    assert {"PREP_ROW_LENGTH", "RECIPE"} <= set(alone.replace(";", " ").split())
    assert "PIP_CONF" not in alone


def test_the_users_own_text_is_prepared(whole: Services, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the service runs as another user
    for number, source in enumerate(sorted((ROOT / "data_pipeline").glob("*.py"))):
        (tmp_path / f"{number}.txt").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    own = whole.with_variables(TEXT_DIR=str(tmp_path), PREP_TEXT__DOCUMENTS="chunks", PREP_TEXT__CHUNK_CHARS="512")
    options = ("--output", "/workspace/own", "--tokenizer.kind", "byte")
    log = own.compose("run", "--rm", "-T", "data-prep", *options).stdout
    assert "root digest sha256:" in log
    assert "built-in" not in log


def test_a_text_folder_that_is_not_there_is_an_error(whole: Services, tmp_path: Path) -> None:
    missing = whole.with_variables(TEXT_DIR=str(tmp_path / "missing"))
    result = missing.compose("run", "--rm", "-T", "data-prep", check=False)
    assert result.returncode != 0
    assert "missing" in result.stderr
    assert not (tmp_path / "missing").exists()
