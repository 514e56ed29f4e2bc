"""Weights & Biases and MLflow, with stand-ins for the packages, and with the packages themselves where they are installed."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from tests.support.step_metrics import step_metrics
from trainer.evaluation.tally import Evaluation
from trainer.machine.sampler import HardwareReading, HostReading
from trainer.metrics.sinks import mlflow_sink
from trainer.metrics.sinks.base import RunFacts, Sink, StepMetrics
from trainer.metrics.sinks.mlflow_sink import MlflowSink
from trainer.metrics.sinks.wandb_sink import WandbSink
from trainer.runs.events import AlertEvent, HardwareEvent, LayersEvent, SampleEvent, SaveEvent

HOST = HostReading(1500.0, 1000.0, 16000.0, 0.5, 100.0)
ALERT = AlertEvent("spike", 7, "warning", "step 7: loss 9 is above 3", "log", 9.0, count=1)
FACTS = RunFacts("a", {"optim": {"lr": 0.001}, "data": "/data"})


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return step_metrics(number, loss, last_step=35, loss_average=2.6)


def everything(sink: Sink) -> None:
    """One of each event."""
    for number in range(1, 36):
        sink.write(step(number, math.nan if number == 7 else 2.5))
    sink.write(Evaluation(2.0, 4, 60).event(35))
    sink.samples(35, (SampleEvent(35, "Once ", "upon"),), None)
    sink.write(LayersEvent(30, {"norm": 1.0}, {"norm": 2.0}, {"norm": 0.25}))
    sink.write(HardwareEvent.of(30, HardwareReading((), HOST), 1.5))
    sink.write(SaveEvent(30, 0.1))
    sink.write(ALERT)
    sink.close("finished")


@dataclass
class FakeWandb:
    """What of the package is used."""

    begun: list[dict[str, Any]] = field(default_factory=list)
    logged: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[tuple[str, str]] = field(default_factory=list)
    axes: list[tuple[str, str | None]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None
    error: Exception | None = None

    def init(self, **settings: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.begun.append(settings)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, points: dict[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.logged.append(points)

    def alert(self, title: str, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.alerts.append((title, text))

    def finish(self, exit_code: int | None = None) -> None:
        self.exit_code = exit_code
        if self.error is not None:
            raise self.error

    @staticmethod
    def Table(columns: list[str], data: list[list[Any]]) -> Any:  # noqa: N802
        return (columns, data)


@dataclass
class FakeMlflow:
    """What of the package is used; a client remembers all runs of its store."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    experiments: dict[str, str] = field(default_factory=dict)
    waited: int = 0
    error: Exception | None = None
    answers: threading.Event | None = None
    """Where there is one, every call that is waited for takes until it is set."""
    entities: Any = field(default_factory=lambda: SimpleNamespace(Metric=Point, Param=lambda key, value: (key, value)))

    def MlflowClient(self, tracking_uri: str) -> Any:  # noqa: N802
        assert tracking_uri == "store"
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = f"id of {name}"
        return self.experiments[name]

    def create_run(self, experiment: str, run_name: str) -> Any:
        run = f"run {len(self.runs)}"
        self.runs[run] = {"experiment": experiment, "name": run_name, "points": [], "params": {}, "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, status: str) -> None:
        self.runs[run]["status"] = status

    def log_batch(self, run: str, metrics: tuple[Any, ...] = (), params: tuple[Any, ...] = (), synchronous: bool = True) -> Any:
        assert len(params) <= 100
        if metrics and self.error is not None:
            raise self.error
        self.runs[run]["points"] += metrics
        self.runs[run]["params"] |= dict(params)
        return None if synchronous else self

    def log_text(self, run: str, text: str, path: str) -> None:
        self.wait()
        self.runs[run][path] = text

    def set_tag(self, run: str, name: str, value: str, synchronous: bool = True) -> Any:
        if synchronous:
            self.wait()
        self.runs[run][name] = value
        return self

    def set_terminated(self, run: str, status: str) -> None:
        self.wait()
        self.runs[run]["status"] = status

    def wait(self) -> None:
        if self.answers is not None:
            assert self.answers.wait(60)
        if self.error is not None:
            raise self.error
        self.waited += 1


@dataclass
class Point:
    key: str
    value: float
    timestamp: int
    step: int


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWandb]:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMlflow]:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    return fake


def test_wandb_is_shown_every_few_steps_and_every_step_that_is_not_finite(wandb: FakeWandb, tmp_path: Path) -> None:
    sink = WandbSink(tmp_path, "project", 10)
    sink.begin(FACTS)
    everything(sink)
    assert [points["step"] for points in wandb.logged if "train/loss" in points] == [1, 7, 10, 20, 30, 35]
    assert math.isnan(wandb.logged[1]["train/loss"])
    assert ("*", "step") in wandb.axes
    assert wandb.alerts == [("spike", "step 7: loss 9 is above 3")]
    assert {"validation/loss", "update_ratio/norm", "host/cpu", "health/alerts_spike"} <= {
        name for points in wandb.logged for name in points
    }
    [[_, rows]] = [points["samples"] for points in wandb.logged if "samples" in points]
    assert rows == [[35, "Once ", "upon"]]
    assert {"step": 30, "speed/save_stall_s": 0.1} in wandb.logged
    assert (wandb.summary, wandb.exit_code) == ({"status": "finished"}, 0)
    [begun] = wandb.begun
    assert (begun["project"], begun["name"], begun["config"]) == ("project", "a", {"optim.lr": 0.001})


def test_a_run_that_goes_on_is_the_same_run_in_wandb(wandb: FakeWandb, tmp_path: Path) -> None:
    for _ in range(2):
        WandbSink(tmp_path, "project", 10).begin(FACTS)
    (tmp_path / "other").mkdir()
    WandbSink(tmp_path / "other", "project", 10).begin(FACTS)
    first, again, other = (begun["id"] for begun in wandb.begun)
    assert first == again != other
    assert all(begun["resume"] == "allow" for begun in wandb.begun)


def test_wandb_that_does_not_start_is_an_error_that_says_what_to_do(wandb: FakeWandb, tmp_path: Path) -> None:
    wandb.error = RuntimeError("no API key")
    sink = WandbSink(tmp_path, "project", 10)
    with pytest.raises(ConfigError, match=r"no API key.*WANDB_MODE=offline"):
        sink.begin(FACTS)
    sink.close()


def test_mlflow_is_shown_every_few_steps_and_every_step_that_is_not_finite(mlflow: FakeMlflow, tmp_path: Path) -> None:
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    everything(sink)
    [run] = mlflow.runs.values()
    assert [point.step for point in run["points"] if point.key == "train/loss"] == [1, 7, 10, 20, 30, 35]
    assert {"validation/loss", "update_ratio/norm", "host/cpu", "health/alerts_spike", "speed/save_stall_s"} <= {
        point.key for point in run["points"]
    }
    assert run["params"] == {"optim.lr": "0.001"}
    assert run["samples/step-00000035.txt"] == "Once upon"
    assert run["alert.spike"] == "step 7: loss 9 is above 3"
    assert run["status"] == "FINISHED"
    assert mlflow.waited == 11 + 1 + 1 + 1, "points, tag, text and end: nothing is left on its way"


@pytest.mark.parametrize("chosen", [None, "3"])
def test_mlflow_sends_with_one_thread_unless_the_user_chose_another_number(
    mlflow: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    name = "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE"
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)
    MlflowSink(tmp_path, "store", "experiment", 10)
    assert os.environ[name] == (chosen or "1")


def test_a_run_that_goes_on_is_the_same_run_in_mlflow(mlflow: FakeMlflow, tmp_path: Path) -> None:
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    sink.close("stopped")
    assert mlflow.runs["run 0"]["status"] == "KILLED"
    MlflowSink(tmp_path, "store", "experiment", 10).begin(FACTS)
    assert [run["status"] for run in mlflow.runs.values()] == ["RUNNING"]
    (tmp_path / "other").mkdir()
    MlflowSink(tmp_path / "other", "store", "experiment", 10).begin(FACTS)
    assert list(mlflow.runs) == ["run 0", "run 1"]
    assert len(mlflow.experiments) == 1


def test_many_settings_are_sent_in_pieces(mlflow: FakeMlflow, tmp_path: Path) -> None:
    MlflowSink(tmp_path, "store", "experiment", 10).begin(RunFacts("a", {f"setting{number}": "x" * 900 for number in range(250)}))
    assert len(mlflow.runs["run 0"]["params"]) == 250
    assert {len(value) for value in mlflow.runs["run 0"]["params"].values()} == {500}


def test_a_store_that_goes_away_loses_points_and_not_the_run(
    mlflow: FakeMlflow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    mlflow.error = ConnectionError("refused")
    everything(sink)
    assert caplog.text.count("points are lost (refused); training continues") == 1


def test_a_wandb_that_goes_away_loses_points_and_not_the_run(
    wandb: FakeWandb, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = WandbSink(tmp_path, "project", 10)
    sink.begin(FACTS)
    wandb.error = ConnectionError("the service is gone")
    everything(sink)
    assert caplog.text.count("log.wandb_project = project: points are lost (the service is gone); training continues") == 1


def test_a_run_that_failed_is_shown_as_failed(wandb: FakeWandb, mlflow: FakeMlflow, tmp_path: Path) -> None:
    for sink in (WandbSink(tmp_path, "project", 10), MlflowSink(tmp_path, "store", "experiment", 10)):
        sink.begin(FACTS)
        sink.write(step(1))
        sink.close()
    assert wandb.exit_code == 1
    assert mlflow.runs["run 0"]["status"] == "FAILED"


def test_no_step_waits_for_a_store_that_does_not_answer_and_the_end_not_for_long(
    mlflow: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mlflow_sink, "_END_S", 0.01)
    mlflow.answers = threading.Event()
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    everything(sink)
    assert mlflow.waited == 0
    assert caplog.text.count("the store does not answer") == 1
    mlflow.answers.set()
    for thread in threading.enumerate():
        if thread.name == "mlflow":
            thread.join()


def test_a_store_that_failed_is_asked_for_nothing_that_would_have_to_be_waited_for(mlflow: FakeMlflow, tmp_path: Path) -> None:
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    sink.write(step(1))
    mlflow.error = ConnectionError("refused")
    sink.write(step(10))
    mlflow.error = None
    sink.samples(1, (SampleEvent(1, "Once ", "upon"),), None)
    sink.close("finished")
    assert mlflow.waited == 0
    assert "samples/step-00000001.txt" not in mlflow.runs["run 0"]


def test_a_store_that_does_not_take_the_run_is_not_told_of_its_end(mlflow: FakeMlflow, tmp_path: Path) -> None:
    (tmp_path / ".mlflow-id").write_text("run that is gone")
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    with pytest.raises(ConfigError, match="does not take the run"):
        sink.begin(FACTS)
    sink.close()
    assert mlflow.waited == 0


def test_names_that_mlflow_does_not_take_are_changed(mlflow: FakeMlflow, tmp_path: Path) -> None:
    sink = MlflowSink(tmp_path, "store", "experiment", 10)
    sink.begin(FACTS)
    sink.write(LayersEvent(1, {"a(b)": 1.0}, {"a(b)": 2.0}, {"a(b)": 0.25}))
    assert {point.key for point in mlflow.runs["run 0"]["points"]} == {
        f"{kind}/a_b_" for kind in ("gradient_norm", "weight_norm", "update_ratio")
    }


@pytest.mark.optional
def test_the_real_wandb_takes_everything_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WandbSink(tmp_path, "project", 10)
    sink.begin(FACTS)
    everything(sink)
    [kept] = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # another process writes the file
    while kept.stat().st_size <= 1000 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert kept.stat().st_size > 1000


@pytest.mark.optional
def test_the_real_mlflow_takes_everything_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sink = MlflowSink(tmp_path, str(tmp_path / "store"), "experiment", 10)
    sink.begin(FACTS)
    everything(sink)
    run = (tmp_path / ".mlflow-id").read_text()
    [folder] = tmp_path.glob(f"store/*/{run}")
    for name in step(1).points():
        lines = (folder / "metrics" / name).read_text().splitlines()
        assert sorted(int(line.split()[2]) for line in lines) == [1, 7, 10, 20, 30, 35]
    assert json.dumps((folder / "params" / "optim.lr").read_text()) == '"0.001"'
    assert (folder / "artifacts" / "samples" / "step-00000035.txt").read_text() == "Once upon"
