import io
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, StorageError
from tests.support.runs import tiny_config
from tests.support.step_metrics import step_metrics
from tests.support.terminals import terminal_as
from trainer.config import AlertsConfig, LogConfig
from trainer.distributed.group import Group
from trainer.distributed.stragglers import SlowRank
from trainer.evaluation.tally import Evaluation
from trainer.machine.sampler import GpuReading, HardwareReading, HostReading
from trainer.metrics import monitor as monitors
from trainer.metrics.layers import LayerNorms, LayerReading
from trainer.metrics.monitor import Monitor, RunningNumbers, opened_monitor
from trainer.metrics.sinks import json_lines
from trainer.metrics.sinks.base import RunFacts, Sink, StepMetrics
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.metrics.sinks.terminal import TerminalSink
from trainer.runs.events import (
    AlertEvent,
    Event,
    HardwareEvent,
    LayersEvent,
    MeasuresEvent,
    SampleEvent,
    Score,
    ScoresEvent,
    TrainEvent,
    perplexity,
)
from trainer.runs.metrics_file import CutOff, events_until, read_events

HOST = HostReading(1500.0, 1000.0, 16000.0, 0.5, 100.0)
READING = HardwareReading((GpuReading(0, "GPU", temperature_c=61.0, throttle=()),), HOST)
ALERT = AlertEvent("spike", 7, "warning", "step 7: loss 9 is above 3", "log", 9.0)


def events(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in found if kind in (None, event["event"])]


class Recorder(Sink):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.alerts: list[AlertEvent] = []
        self.readings: list[HardwareEvent] = []

    def write(self, event: Event) -> None:
        match event:
            case StepMetrics():
                self.steps.append(event)
            case AlertEvent():
                self.alerts.append(event)
            case HardwareEvent():
                self.readings.append(event)


def test_growing_memory_of_a_gpu_reaches_the_sinks_as_a_curve_and_an_alert() -> None:
    recorder = Recorder()
    grown = iter([replace(READING, gpus=(replace(READING.gpus[0], memory_used_mib=1000.0 + 10 * number),)) for number in range(80)])
    monitor = Monitor([recorder], readings=lambda: [next(grown)])
    for step in range(1, 81):
        monitor.train(step_metrics(step))
    assert [(alert.rule, alert.step) for alert in recorder.alerts] == [("gpu_memory", 60)]
    assert recorder.readings[0].points().keys() >= {"gpu_0/memory_used_mib"}
    assert "gpu_0/memory_growth_mb_per_1000_steps" not in recorder.readings[0].points()
    assert recorder.readings[-1].points()["gpu_0/memory_growth_mb_per_1000_steps"] == pytest.approx(10_000 * 2**20 / 1e6)


def test_a_loss_is_kept_exactly(tmp_path: Path) -> None:
    loss = 2.1234567890123457
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", None)
    sink.write(step_metrics(1, loss))
    sink.close()
    [event] = events(tmp_path / "metrics.jsonl")
    assert float.fromhex(str(event["loss_hex"])) == loss
    assert event["event"] == "train"


def test_after_a_resume_every_step_appears_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    for number in range(1, 8):
        sink.write(step_metrics(number))
        sink.write(LayersEvent(number, {"norm": 1.0}, {"norm": 2.0}, {"norm": 0.25}))
        sink.write(HardwareEvent.of(number, READING, 3.5))
    sink.write(Evaluation(2.0, 4, 60).event(5))
    sink.write(ALERT)
    sink.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 8, "lo')  # killed while writing
    resumed = JsonLinesSink(path, CutOff(5))
    for number in range(6, 9):
        resumed.write(step_metrics(number))
    resumed.close()
    assert [event["step"] for event in events(path, "train")] == list(range(1, 9))
    assert [event["step"] for event in events(path, "eval")] == [5]
    assert [event["step"] for event in events(path, "layers")] == list(range(1, 6))
    assert [event["step"] for event in events(path, "hardware")] == list(range(1, 6))
    assert events(path, "alert") == []
    assert [event.step for event in read_events(path) if isinstance(event, TrainEvent)] == list(range(1, 9))


def test_a_fresh_start_keeps_nothing_of_a_run_that_was_never_saved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonLinesSink(path, None)
        sink.write(Evaluation(5.0, 4, 60).event(0))
        sink.close()
    assert len(events(path)) == 1


def test_a_rollback_cuts_the_file_at_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    for number in range(1, 6):
        sink.write(step_metrics(number))
    sink.rewind(CutOff(3))
    sink.write(step_metrics(4, 1.5))
    sink.close()
    assert [(event["step"], event["loss"]) for event in events(path)] == [(1, 2.5), (2, 2.5), (3, 2.5), (4, 1.5)]


def test_a_last_line_that_lost_only_its_end_is_kept_as_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLinesSink(path, None)
    first.write(step_metrics(1))
    first.close()
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    resumed = JsonLinesSink(path, CutOff(1))
    resumed.write(step_metrics(2))
    resumed.close()
    assert [event.step for event in read_events(path)] == [1, 2]


def test_a_text_that_is_no_unicode_is_kept_as_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    sink.write(SampleEvent(1, "a\udcff", "é"))
    sink.rewind(CutOff(1))
    sink.write(SampleEvent(1, "b\ud800", "c"))
    sink.close()
    assert [event["text"] for event in events(path)] == ["a\udcffé", "b\ud800c"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_an_error_of_the_storage_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    sink.close()
    monkeypatch.setattr(sink, "_file", Path("/dev/full").open("a"))  # noqa: SIM115 - the sink closes it
    for action in (lambda: sink.write(step_metrics(1)), sink.close):
        with pytest.raises(StorageError, match=r"metrics\.jsonl: no space left on the device.*; make room"):
            action()


def test_the_numbers_of_a_run_can_be_forced_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, os.fstat(file).st_size)))
    monitor = Monitor([Sink(), sink])
    monitor.train(step_metrics(1))
    monitor.sync()
    assert synced == [(path.stat().st_ino, path.stat().st_size)]

    def fails(_file: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: input/output error"):
        monitor.sync()
    sink.close()


def test_the_name_of_a_new_file_is_on_the_device_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(json_lines, "sync_directory", synced.append)
    JsonLinesSink(tmp_path / "metrics.jsonl", None).close()
    assert synced == [tmp_path]


def test_a_number_that_is_not_finite_stays_visible_in_valid_json_however_deep_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    sink.write(step_metrics(1, math.nan))
    sink.write(LayerReading(1, {"norm": LayerNorms(math.nan, 0.0, math.inf)}, {}, {}).event)
    sink.write(replace(ALERT, value=math.inf))
    sink.write(ScoresEvent(1, {"fluency": math.nan, "of": [1.0, -math.inf]}))
    sink.close()
    train, layers, alert, scores = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert (train["loss"], train["perplexity"]) == ("nan", "nan")
    assert (layers["gradient_norm"], layers["update_ratio"]) == ({"norm": "nan"}, {"norm": "inf"})
    assert alert["value"] == "inf"
    assert (scores["fluency"], scores["of"]) == ("nan", [1.0, "-inf"])


def test_an_evaluation_is_kept_with_its_groups(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", None)
    by_source = {"code": Score(1.0, 40, 70), "prose": Score(math.inf, 20, 30)}
    sink.write(Evaluation(2.0, 4, 60, num_bytes=100, by_source=by_source).event(5))
    sink.close()
    [event] = events(tmp_path / "metrics.jsonl")
    assert event["val_loss"] == 2.0
    assert event["bits_per_byte"] == pytest.approx(2.0 * 60 / math.log(2) / 100)
    assert event["by_source"]["code"]["targets"] == 40
    assert event["by_source"]["prose"]["loss"] == "inf"
    assert "by_kind" not in event


def test_an_alert_and_samples_are_kept_with_all_their_facts(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", None)
    sink.write(ALERT)
    sink.samples(4, (SampleEvent(4, "Once ", "upon"), SampleEvent(4, "", "a time")), ScoresEvent(4, {"distinct_1": 0.5}))
    sink.close()
    alert, first, second, scores = events(tmp_path / "metrics.jsonl")
    assert alert == {
        "event": "alert",
        "rule": "spike",
        "step": 7,
        "severity": "warning",
        "message": "step 7: loss 9 is above 3",
        "action": "log",
        "value": 9.0,
        "threshold": None,
    }
    assert first == {"event": "sample", "step": 4, "prompt": "Once ", "text": "Once upon"}
    assert second["text"] == "a time"
    assert scores == {"event": "scores", "step": 4, "distinct_1": 0.5}


def test_without_a_terminal_there_is_one_line_every_few_steps() -> None:
    stream = io.StringIO()
    sink = TerminalSink(0, 100, 10, stream, now=lambda: "12:00:00")
    for number in range(1, 101):
        sink.write(step_metrics(number, run_s=2.0 * number, left_s=None if number == 1 else 100.0 - number))
    lines = stream.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["1/100", *(f"{number}/100" for number in range(10, 101, 10))]
    assert "loss 2.5000" in lines[0]
    assert all(line.startswith("12:00:00  step ") for line in lines)
    assert lines[0].endswith("  2.0 s so far")
    assert lines[5].endswith("  1 min 40 s so far, about 50 s left")


def test_a_bar_of_a_run_that_time_alone_limits_shows_the_time_that_is_left() -> None:
    with terminal_as("stderr") as shown:
        sink = TerminalSink(0, None, 10, sys.stderr)
        sink.write(step_metrics(1, last_step=None, run_s=61.0, left_s=179.0))
        assert sink._bar is not None
        sink._bar.refresh()
        assert "step 1, 1 min 01 s so far, about 2 min 59 s left, loss 2.5000, 1k tok/s" in shown()
        sink.close()


def test_a_bar_ends_at_the_step_at_which_the_run_ends() -> None:
    with terminal_as("stderr") as shown:
        sink = TerminalSink(0, 1000, 10, sys.stderr)
        for number in (1, 2, 3):
            sink.write(step_metrics(number, last_step=4 if number > 1 else 1000))
        assert sink._bar is not None
        sink._bar.refresh()
        assert " 75%|" in shown()
        sink.close()


def test_alerts_samples_and_scores_are_lines_for_people() -> None:
    stream = io.StringIO()
    sink = TerminalSink(0, 100, 10, stream, now=lambda: "12:00:00")
    sink.write(step_metrics(20, loss_average=2.75, num_averaged=20))
    sink.write(ALERT)
    samples = (SampleEvent(20, "a", "b\n  c\x1b[2J"), SampleEvent(20, "other", " text"))
    sink.samples(20, samples, ScoresEvent(20, {"distinct_2": 0.51234, "mtld": 9.0, "words": ["x"]}))
    sink.samples(30, (SampleEvent(30, "", "\n" * 40),), None)
    sink.samples(40, (SampleEvent(40, "a whole turn of a user\n" + "u" * 200, "t" * 64 * 5),), None)  # one line on a terminal
    first, *rest = stream.getvalue().splitlines()
    assert "loss 2.5000 (mean of 20 steps 2.7500)" in first
    assert rest == [
        "12:00:00  warning: step 7: loss 9 is above 3",
        "12:00:00  step 20  sample: a → b c⟨U+001B⟩[2J",
        "12:00:00  step 20  scores of the samples: distinct pairs 0.512",
        "12:00:00  step 30  sample: ",
        f"12:00:00  step 40  sample: …{'u' * 39} → {'t' * 76}…",
    ]


def test_perplexity_of_a_hopeless_model_is_infinite_and_of_no_number_is_no_number() -> None:
    assert Evaluation(1e4, 1, 1).perplexity == math.inf
    assert Evaluation(math.log(50), 1, 1).perplexity == pytest.approx(50)
    assert step_metrics(1, 800.0).perplexity == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(math.inf) == math.inf
    assert perplexity(-math.inf) == 0


def test_shares_of_a_step_are_known_where_its_duration_is() -> None:
    assert step_metrics(1).loader_wait_share is None
    known = step_metrics(1, seconds=0.1, loader_wait_s=0.025, monitor_s=0.001)
    assert (known.loader_wait_share, known.monitor_share) == pytest.approx((0.25, 0.01))


def test_scores_are_the_values_that_are_numbers() -> None:
    assert ScoresEvent(1, {"a": 1, "b": 0.5, "c": True, "d": "x", "e": None}).numbers == {"a": 1.0, "b": 0.5}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(2, 20))
def test_the_average_is_that_of_the_last_losses(losses: list[float], steps: int) -> None:
    running = RunningNumbers(steps)
    for loss in losses:
        running.after_step(loss, 1.0)
    last = losses[-steps:]
    assert running.loss_average == math.fsum(last) / len(last)


def test_losses_that_are_not_finite_are_counted_and_left_out_of_the_average() -> None:
    running = RunningNumbers(10)
    assert running.loss_average is None
    running.after_step(math.nan, 1.0)
    assert running.loss_average is None
    running.after_step(2.0, math.inf)
    running.after_step(4.0, 1.0)
    assert (running.loss_average, running.non_finite_steps) == (3.0, 2)


def test_a_resumed_run_knows_average_and_counts_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    losses = [10 / number + 1e-16 * number for number in range(1, 41)]
    losses[33] = math.nan

    def ran(monitor: Monitor, first: int, last: int) -> list[float | None]:
        found = []
        for number in range(first, last + 1):
            found.append(monitor.train(step_metrics(number, losses[number - 1])).loss_average)
            if number in (5, 37):
                monitor.alert(replace(ALERT, step=number))
        return found

    first = JsonLinesSink(path, None)
    whole = Monitor([first], RunningNumbers(10))
    expected = ran(whole, 1, 40)
    running = RunningNumbers(10)
    running.restore(events_until(path, CutOff(36)))
    assert (running.non_finite_steps, running.alerts) == (1, {"spike": 1})
    second = JsonLinesSink(path, CutOff(36))
    resumed = Monitor([second], running)
    assert ran(resumed, 37, 40) == expected[36:]
    assert resumed.alert_counts == whole.alert_counts == {"spike": 2}
    for sink in (first, second):
        sink.close()


def test_a_rollback_takes_average_and_counts_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    monitor = Monitor([sink], RunningNumbers(10), history=lambda known: events_until(path, known))
    for number in range(1, 9):
        monitor.train(step_metrics(number, float(number) if number < 7 else math.nan))
    monitor.alert(ALERT)
    monitor.rewind(CutOff(4))
    full = monitor.train(step_metrics(5, 5.0))
    assert (full.loss_average, full.non_finite_steps) == (3.0, 0)
    assert monitor.alert_counts == {}
    sink.close()


def test_a_metrics_file_of_an_older_run_can_be_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"event": "train", "step": 1, "loss": 2.5, "loss_hex": "0x1.4p+1", "grad_norm": 1.0}\n'
        '{"event": "alert", "step": 1, "message": "old"}\n'
    )
    running = RunningNumbers(10)
    running.restore(events_until(path, CutOff(1)))
    assert (running.loss_average, running.alerts) == (2.5, {})
    assert list(events_until(tmp_path / "missing", CutOff(1))) == []


def test_readings_of_the_machine_come_with_the_step_that_was_reported_last() -> None:
    sink, waiting = Recorder(), [[READING], [], [READING, READING]]
    monitor = Monitor([sink], readings=lambda: waiting.pop(0))
    for number in (1, 2, 3):
        monitor.train(step_metrics(number))
    assert sink.readings == [HardwareEvent.of(number, READING, None) for number in (1, 3, 3)]


def test_the_time_of_the_monitor_itself_is_told_with_the_next_step() -> None:
    sink = Recorder()
    monitor = Monitor([sink])
    monitor.train(step_metrics(1, seconds=0.1))
    monitor.train(step_metrics(2, seconds=0.1))
    assert sink.steps[0].monitor_s == 0
    assert 0 < (sink.steps[1].monitor_s or 0) < 1
    assert sink.steps[1].monitor_share == (sink.steps[1].monitor_s or 0) / 0.1


def test_an_alert_with_the_action_stop_is_what_the_run_stops_for() -> None:
    sink = Recorder()
    monitor = Monitor([sink], alerts=AlertsConfig(disk="stop"))
    monitor.hardware(3, replace(READING, xids=(79,)))
    assert monitor.stop_alert is None
    monitor.hardware(4, HardwareReading((), replace(HOST, disk_free_gb=0.1)))
    assert monitor.stop_alert == replace(sink.alerts[-1], count=0)
    assert [(alert.rule, alert.step, alert.count) for alert in sink.alerts] == [("xid", 3, 1), ("disk", 4, 1)]
    assert monitor.alert_counts == {"xid": 1, "disk": 1}


def test_a_slow_rank_and_slow_steps_reach_the_sinks_as_alerts() -> None:
    sink = Recorder()
    monitor = Monitor([sink])
    monitor.slow_rank(9, None)
    monitor.slow_rank(9, SlowRank(3, 2.5, "data", 0.5, 0.2))
    for number in range(1, 200):
        monitor.train(step_metrics(number, tokens_per_s=1000.0 if number < 100 else 300.0, seconds=30.0))
    assert [(alert.rule, alert.step) for alert in sink.alerts] == [("slow_rank", 9), ("throughput", 113)]


def test_a_rank_without_sinks_judges_nothing() -> None:
    monitor = Monitor()
    for number in range(1, 200):
        monitor.train(step_metrics(number, tokens_per_s=1000.0 if number < 100 else 300.0))
    assert monitor.alert_counts == {}


class Ending(Sink):
    def __init__(self, name: str, closed: list[tuple[str, str | None]]) -> None:
        self._name, self._closed = name, closed

    def close(self, status: str | None = None) -> None:
        self._closed.append((self._name, status))
        if self._name == "full":
            raise StorageError("no space left on the device")


def test_each_sink_is_closed_once_and_learns_how_the_run_ended_although_another_one_fails() -> None:
    closed: list[tuple[str, str | None]] = []
    monitor = Monitor([Ending("file", closed), Ending("full", closed), Ending("terminal", closed)])
    with pytest.raises(StorageError, match="no space"):
        monitor.close("finished")
    monitor.close()
    assert closed == [("terminal", "finished"), ("full", "finished"), ("file", "finished")]


def test_a_sink_that_cares_for_nothing_takes_everything() -> None:
    sink = Sink()
    sink.begin(RunFacts("run", {}))
    sink.write(step_metrics(1))
    sink.samples(1, (SampleEvent(1, "", "text"),), ScoresEvent(1, {}))
    sink.histograms(LayerReading(1, {}, {}, {}))
    sink.rewind(CutOff(0))
    sink.sync()
    sink.close("finished")


def test_a_run_s_monitor_writes_the_stream_and_goes_on_with_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", tmp_path, log={"hardware_every_s": 0.01})
    group = Group(0, 1, 0, torch.device("cpu"))
    with opened_monitor(config, group, last_step=4, cut_off=None) as monitor:
        for number in range(1, 4):
            monitor.train(step_metrics(number, float(number)))
        while not events(tmp_path / "metrics.jsonl", "hardware"):
            monitor.train(step_metrics(len(events(tmp_path / "metrics.jsonl", "train")) + 1, 9.0))
    with opened_monitor(config, group, last_step=4, cut_off=CutOff(2)) as monitor:
        assert monitor.train(step_metrics(3, 3.0)).loss_average == 2.0
    assert [event["step"] for event in events(tmp_path / "metrics.jsonl", "train")] == [1, 2, 3]
    assert list((tmp_path / "tensorboard").iterdir())


class Elsewhere(Group):
    """The first rank of another machine, for which rank 0 opens what is rank 0's."""

    def on_main(self, action: Callable[[], Any]) -> Any:
        return None


def test_the_first_rank_of_another_machine_keeps_what_that_machine_does(tmp_path: Path) -> None:
    config = tiny_config(tmp_path / "data", tmp_path, log={"hardware_every_s": 0})
    with opened_monitor(config, Elsewhere(8, 16, 0, torch.device("cpu")), last_step=4, cut_off=None) as monitor:
        monitor.train(step_metrics(1))
        monitor.hardware(1, replace(READING, xids=(79,)))
    assert [event["event"] for event in events(tmp_path / "hardware-rank-8.jsonl")] == ["hardware", "alert"]
    with opened_monitor(config, Elsewhere(9, 16, 1, torch.device("cpu")), last_step=4, cut_off=None) as monitor:
        monitor.train(step_metrics(1))
    assert [path.name for path in tmp_path.iterdir()] == ["hardware-rank-8.jsonl"]


def test_a_password_in_a_setting_is_refused_because_settings_are_kept() -> None:
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD"):
        LogConfig(mlflow_uri="https://me:secret@example.org")
    assert LogConfig(mlflow_uri="https://example.org").mlflow_uri == "https://example.org"


def test_a_service_that_is_not_installed_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, package, setting in (("wandb", "wandb", "wandb_project"), ("mlflow", "mlflow-skinny", "mlflow_uri")):
        monkeypatch.setitem(sys.modules, name, None)
        config = tiny_config(tmp_path / "data", tmp_path, log={"hardware_every_s": 0, setting: "x"})
        group = Group(0, 1, 0, torch.device("cpu"))
        with (
            pytest.raises(ConfigError, match=f"pip install {package}"),
            opened_monitor(config, group, last_step=None, cut_off=None),
        ):
            pytest.fail("the run was begun")


def test_a_run_is_shown_in_the_experiment_that_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, ...]] = []

    class Kept(Sink):
        def __init__(self, *arguments: object) -> None:
            opened.append(arguments)

    monkeypatch.setattr(monitors, "MlflowSink", Kept)
    config = tiny_config(
        tmp_path / "data", tmp_path, log={"hardware_every_s": 0, "mlflow_uri": "store", "mlflow_experiment": "night"}
    )
    with opened_monitor(config, Group(0, 1, 0, torch.device("cpu")), last_step=None, cut_off=None):
        assert opened == [(tmp_path, "store", "night", config.log.every_steps)]


def test_an_evaluation_without_a_perplexity_has_the_losses_of_its_groups() -> None:
    by_source = {"code": Score(1.0, 40), "prose": Score(0.5, 20)}
    event = MeasuresEvent(5, {"accuracy": 0.5})
    with_measures = Evaluation(0.75, 4, 60, by_source=by_source, measured=lambda _step: event).event(5)
    points = with_measures.points()
    assert points == {"validation/loss": 0.75, "validation_loss_source/code": 1.0, "validation_loss_source/prose": 0.5}
    assert "validation_source/code" in Evaluation(0.75, 4, 60, by_source=by_source).event(5).points()
