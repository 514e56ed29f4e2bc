"""`make gpu`: a rehearsal of all its parts on the CPU, and its judgement of what went wrong."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu
from tests.benchmarks.gpu import REHEARSAL, Bench, Found, gpu_tests, measure, run_tests
from tests.benchmarks.gpu_results import EXPECTED, Item, Results, failed, passed
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT


def bench(folder: Path, left_s: float = 300) -> Bench:
    return Bench(folder / "data", folder, REHEARSAL, time.monotonic() + left_s)


def test_a_rehearsal_makes_every_measurement_and_ends_with_a_table(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "GPU_RESULTS": str(tmp_path), "GPU_BUNDLE": str(tmp_path / "none")}
    command = [str(ROOT / "env" / "gpu"), "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr + done.stdout
    *_, last = done.stdout.splitlines()
    assert " 0 failed" in last
    items = json.loads((tmp_path / "rehearsal" / "results.json").read_text())["items"]
    assert items["tests"]["tests marked gpu"]["passed"] > 100
    assert {name for name in EXPECTED["levels"] if items["levels"][name]["status"] == "passed"} == set(EXPECTED["levels"])
    assert items["train"]["stopped half way and resumed: the same bits"]["status"] == "passed"
    table = (tmp_path / "rehearsal" / "results.md").read_text()
    assert table in done.stdout
    assert all(f"| {part} | {name} | " in table for part, names in EXPECTED.items() for name in names)


def test_relative_folders_are_below_the_current_folder(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "GPU_RESULTS": "mine", "GPU_BUNDLE": "none"}
    subprocess.run([str(ROOT / "env" / "gpu"), "summary"], cwd=tmp_path, check=True, capture_output=True, env=environment)
    assert (tmp_path / "mine").is_dir()


def test_a_resumed_run_is_unmeasured_if_there_is_no_uninterrupted_run_to_compare_it_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(_: Bench, name: str, *extra: str) -> Item:
        trained.append(name)
        return failed("training failed")

    monkeypatch.setattr(Bench, "train", train)
    results = Results(tmp_path, "a machine")
    measure("train", bench(tmp_path), results)
    assert [item["status"] for item in results.items["train"].values()] == ["failed", "unmeasured"]
    assert trained == ["whole"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests marked gpu are not skipped here")
def test_it_is_a_failure_if_no_test_ran(tmp_path: Path) -> None:
    assert "tests/integration/test_device_training.py" in gpu_tests()
    item = run_tests(bench(tmp_path), ["-m", "gpu", "tests/unit/trainer/model/test_loss.py"])
    assert (item["status"], item["reason"], item["passed"]) == ("failed", "no test ran", 0)
    assert item["skipped"] > 0


def test_a_training_that_fails_or_takes_too_long_is_a_failure_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "LEAST_S", 1)
    write_prepared(tmp_path / "data", row_length=128)
    item = bench(tmp_path).train("wrong", "--optim.kind", "nonsense")
    assert item["status"] == "failed"
    assert "nonsense" in item["reason"]
    item = bench(tmp_path, 5).train("long", "--limits.steps", "1000000", "--schedule.decay_steps", "1000000")
    assert item["status"] == "failed"
    assert "end of its time" in item["reason"]


def test_an_error_or_a_lack_of_time_loses_no_other_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(bench: Bench) -> Found:
        yield "plain loop", lambda: passed(figure=bench.left_s() > 0)
        yield "transformers Trainer", lambda: failed(str(1 / 0))

    monkeypatch.setitem(gpu.PARTS, "peers", part)
    results = Results(tmp_path / "results", "this machine")
    measure("peers", bench(tmp_path), results)
    statuses = [results.items["peers"][name]["status"] for name in EXPECTED["peers"]]
    assert statuses == ["passed", "failed"]
    assert "ZeroDivisionError" in results.items["peers"]["transformers Trainer"]["reason"]
    measure("peers", bench(tmp_path, left_s=1), results)
    assert results.items["peers"]["plain loop"] | {"date": ""} == {"status": "unmeasured", "reason": "no time was left", "date": ""}


def test_results_of_later_commands_are_added_on_the_same_machine_only(tmp_path: Path) -> None:
    for part, name in (("golden", "losses of smoke"), ("peers", "plain loop")):
        results = Results(tmp_path, "this machine")
        results.begin(part)
        results.add(part, name, passed(figure=1234567))
    assert Results(tmp_path, "this machine").counts()["passed"] == 2
    assert "figure 1,234,567" in (tmp_path / "results.md").read_text()
    assert Results(tmp_path, "another machine").counts()["passed"] == 0
    summary = Results(tmp_path, None)
    assert (summary.machine, summary.counts()["passed"]) == ("this machine", 2)


def test_the_table_replaces_the_one_in_the_page_of_benchmarks(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    results = Results(tmp_path, "this machine")
    for figure in (1, 2):
        results.begin("peers")
        results.add("peers", "plain loop", passed(figure=figure))
        results.write_docs(page)
    text = page.read_text()
    assert text.count("| peers | plain loop | passed | figure 2 |") == text.count("| peers | plain loop |") == 1
    assert text.startswith("# Benchmarks")
    assert text.endswith((ROOT / "docs" / "benchmarks.md").read_text()[-500:])
    page.write_text("# Benchmarks\n")
    with pytest.raises(SystemExit, match="no line <!-- results of make gpu -->"):
        results.write_docs(page)
