"""The alerts on 20 recorded healthy runs on a busy machine: none fires; planted faults in the same runs are found.

`tests/golden/healthy_runs.jsonl` (`tests.support.recorded_runs` adds to it) has what the rules read in runs of up to 1,500 steps:
narrow, wide and deep models, one rank and two, large and small batches, frequent evaluations and saves. Other trainings ran on
the same two cores. For each run: step, seconds, wait and tokens/s; loss and gradient norm; private and available memory in MiB;
own times of the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.step_metrics import step_metrics
from trainer.config import AlertsConfig, GuardConfig
from trainer.distributed.stragglers import OwnTime, StragglerDetector
from trainer.health.alert_rules import LASTING_FALL_S, AlertRules
from trainer.health.guard import Guard
from trainer.machine.sampler import HardwareReading, HostReading

FILE = Path(__file__).parents[3] / "golden/healthy_runs.jsonl"
RUNS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
NAMES = [run["name"] for run in RUNS]
LONG = [run for run in RUNS if len(run["steps"]) > 90]


def found_in(run: dict[str, Any]) -> set[str]:
    """Return the rules that fire in a run with the default settings."""
    return {*_of_steps(run["steps"]), *_of_readings(run["readings"]), *_of_losses(run["losses"]), *_of_ranks(run["own"])}


def _of_steps(steps: list[list[float]]) -> list[str]:
    rules = AlertRules(AlertsConfig())
    alerts = [
        rules.after_step(step_metrics(int(step), seconds=s, loader_wait_s=waited, tokens_per_s=rate))
        for step, s, waited, rate in steps
    ]
    return [alert.rule for each in alerts for alert in each]


def _of_readings(readings: list[list[float]]) -> list[str]:
    rules = AlertRules(AlertsConfig())
    hosts = [(int(step), HostReading(private, private, available, 0.9, 100.0)) for step, private, available in readings]
    return [alert.rule for step, host in hosts for alert in rules.after_reading(step, HardwareReading((), host))]


def _of_losses(losses: list[list[float]]) -> list[str]:
    guard = Guard(GuardConfig())
    verdicts = [guard.judge(int(step), loss, norm) for step, loss, norm in losses]
    return [str(verdict.rule) for verdict in verdicts if verdict.rule and verdict.is_news]


def _of_ranks(own: list[list[Any]]) -> list[str]:
    detector = StragglerDetector()
    return ["slow_rank" for step_s, *times in own if detector.observe([OwnTime(*one) for one in times], step_s)]


def test_there_are_twenty_runs_of_different_sizes() -> None:
    assert len(RUNS) == len(set(NAMES)) == 20
    assert sum(bool(run["own"]) and len(run["own"][0]) == 3 for run in RUNS) >= 5, "runs of two ranks"


@pytest.mark.parametrize("run", RUNS, ids=NAMES)
def test_a_healthy_run_raises_no_alert(run: dict[str, Any]) -> None:
    assert found_in(run) == set()


@pytest.mark.parametrize("run", LONG, ids=[run["name"] for run in LONG])
def test_a_run_that_becomes_half_as_fast_and_stays_so_is_found(run: dict[str, Any]) -> None:
    usual = median(rate for *_, rate in run["steps"][-200:])
    seconds = median(s for _, s, *_ in run["steps"][-200:])
    first = run["steps"][-1][0] + 1
    slow = [[first + number, 2 * seconds, 0.0, usual / 2] for number in range(20 + int(1.1 * LASTING_FALL_S / seconds))]
    assert "throughput" in _of_steps([*run["steps"], *slow])


@pytest.mark.parametrize("run", LONG, ids=[run["name"] for run in LONG])
def test_memory_that_leaks_is_found(run: dict[str, Any]) -> None:
    *_, (step, private, available) = run["readings"]
    each = max(1, int(step / len(run["readings"])))
    leak = [[step + number * each, private + 4 * number, available - 4 * number] for number in range(1, 80)]
    limit_mb = 4 * 2**20 / 1e6 / each * 1000
    assert ("host_memory" in _of_readings([*run["readings"], *leak])) == (limit_mb > AlertsConfig().host_memory_mb)


@pytest.mark.parametrize("run", LONG, ids=[run["name"] for run in LONG])
def test_gradients_that_explode_are_found(run: dict[str, Any]) -> None:
    last = run["losses"][-1]
    assert "exploding" in _of_losses([*run["losses"], *([last[0] + number, last[1], 500.0] for number in (1, 2, 3))])


TWO_RANKS = [run for run in LONG if run["own"] and len(run["own"][0]) == 3]


@pytest.mark.parametrize("run", TWO_RANKS, ids=[run["name"] for run in TWO_RANKS])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_becomes_slow_is_found(run: dict[str, Any], rank: int) -> None:
    slowed = []
    for step_s, *times in run["own"][-60:]:
        seconds = median(one[0] for one in times)
        times[rank] = [4 * seconds + 0.1, 0.0]
        slowed.append([step_s + 3 * seconds + 0.1, *times])
    assert "slow_rank" in _of_ranks(slowed)
