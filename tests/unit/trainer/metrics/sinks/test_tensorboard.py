import io
import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import RendererAgg
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.summary.writer import event_file_writer
from torch import nn

from tests.support.report_example import example_report
from tests.support.step_metrics import step_metrics
from trainer.distributed.group import Group
from trainer.evaluation.tally import Evaluation
from trainer.machine.sampler import GpuReading, HardwareReading, HostReading
from trainer.metrics.layers import BIN_LIMITS, Histogram, LayerNorms, LayerObserver, LayerReading
from trainer.metrics.sinks.base import RunFacts, StepMetrics, hyper_parameters
from trainer.metrics.sinks.tensorboard import TensorBoardSink, layout
from trainer.report.pictures import length_histogram, perplexity_bars
from trainer.runs.events import AlertEvent, HardwareEvent, SampleEvent, SaveEvent, Score, TrainEvent
from trainer.runs.metric import metrics_of
from trainer.runs.metrics_file import CutOff

HOST = HostReading(1500.0, 1000.0, 16000.0, 0.5, 100.0)
GPU = GpuReading(1, "GPU", utilisation=0.98, temperature_c=61.0, throttle=("idle",), ecc_corrected=2)
SETTINGS = {
    "run": "/workspace/runs/a",
    "data": "/workspace/data",
    "seed": 1,
    "tf32": False,
    "recipe": None,
    "optim": {"lr": 0.001, "kind": "adamw"},
    "mixture": {"weights": {}},
    "schedule": {"milestones": [1, 2]},
}


@pytest.fixture(autouse=True)
def first_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """File names as in a new process. They end with a number, and a reader takes `10` before `9`.

    A training does not write ten files within a second, but the tests of a process do.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


def step(number: int, loss: float = 2.5, **changes: Any) -> StepMetrics:
    measured = {"mfu": 0.4, "seconds": 0.01, "loss_average": 2.6, "monitor_s": 1e-5}
    return step_metrics(number, loss, **(measured | changes))


def read(directory: Path) -> EventAccumulator:
    events = EventAccumulator(
        str(directory), size_guidance={"scalars": 0, "images": 0, "histograms": 0, "tensors": 0, "compressedHistograms": 0}
    )
    events.Reload()
    return events


def steps_of(events: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in events.Scalars(tag)]


def texts(events: EventAccumulator, tag: str) -> list[str]:
    return [event.tensor_proto.string_val[0].decode() for event in events.Tensors(f"{tag}/text_summary")]


@pytest.fixture
def sink(tmp_path: Path) -> Iterator[TensorBoardSink]:
    made = TensorBoardSink(tmp_path, None, 10)
    yield made
    made.close()


def test_curves_have_a_point_every_few_steps_and_at_both_ends(sink: TensorBoardSink, tmp_path: Path) -> None:
    for number in range(1, 36):
        sink.write(step(number, last_step=35))
    sink.close()
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {*step(1).points(), "Loss/train"}
    for tag in events.Tags()["scalars"]:
        assert steps_of(events, tag) == [1, 10, 20, 30, 35]
    assert [one.value for one in events.Scalars("Loss/train")] == [one.value for one in events.Scalars("train/loss")]


def test_a_step_that_is_not_finite_is_counted_where_it_happens(sink: TensorBoardSink, tmp_path: Path) -> None:
    for number in range(1, 21):
        bad = number in (7, 10)
        count = sum(number >= at for at in (7, 10))
        sink.write(step(number, math.nan if bad else 2.5, non_finite_steps=count))
    sink.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("health/non_finite_steps")] == [(1, 0), (7, 1), (10, 2), (20, 2)]
    assert math.isnan(events.Scalars("train/loss")[1].value)


@pytest.mark.parametrize("how", ["killed", "rewound"])
def test_no_point_appears_twice_after_a_resume_or_a_rollback(how: str, tmp_path: Path) -> None:
    def everything(sink: TensorBoardSink, first: int, last: int) -> None:
        for number in range(first, last + 1):
            sink.write(step(number))
            sink.write(reading_of(number).event)
            sink.histograms(reading_of(number))
            sink.write(HardwareEvent.of(number, HardwareReading((GPU,), HOST), 1.0))
            sink.write(SaveEvent(number, 0.1))
            sink.write(Evaluation(2.0, 4, 60, by_source={"code": Score(1.0, 40)}).event(number))
            sink.samples(number, (SampleEvent(number, "a", "b"),), None)
            sink.write(AlertEvent("spike", number, "warning", "text", "log", count=number))

    sink = TensorBoardSink(tmp_path, None, 1)
    sink.begin(RunFacts("a", SETTINGS))
    everything(sink, 1, 3)
    sink.sync()  # before a checkpoint
    everything(sink, 4, 6)
    if how == "killed":
        sink.close()
        sink = TensorBoardSink(tmp_path, CutOff(3), 1)
        sink.begin(RunFacts("a", SETTINGS))
    else:
        sink.rewind(CutOff(3))
    everything(sink, 4, 5)
    sink.sync()
    sink.close()
    events = read(tmp_path)
    assert len(events.Tags()["scalars"]) > 20
    for tag in events.Tags()["scalars"]:
        assert steps_of(events, tag) == [1, 2, 3, 4, 5], tag
    assert [event.step for event in events.Histograms("weights/norm")] == [1, 2, 3, 4, 5]
    served = plugin_event_accumulator.EventAccumulator(
        str(tmp_path), tensor_size_guidance={"text": 0}
    )  # as TensorBoard reads texts
    served.Reload()
    for tag in ("sample/text_summary", "alert/text_summary"):
        assert [event.step for event in served.Tensors(tag)] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Images("validation/perplexity_by_source")] == [1, 2, 3, 4, 5]


def reading_of(number: int) -> LayerReading:
    counts = np.zeros(len(BIN_LIMITS) + 1, np.int64)
    counts[50:60] = number
    histogram = Histogram(counts, 1.0, 2.0)
    return LayerReading(number, {"norm": LayerNorms(1.0, 2.0, 0.5)}, {"norm": histogram}, {"norm": histogram})


def test_the_layout_names_curves_that_exist(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.begin(RunFacts("a", SETTINGS))
    sink.write(replace(step(1), muon_lr=1e-2))
    evaluation = Evaluation(2.0, 4, 60, num_bytes=9, by_source={"code": Score(1.0, 40)}).event(1)
    sink.write(replace(evaluation, gap=0.1, trend=-2.0))
    sink.write(reading_of(1).event)
    sink.write(SaveEvent(1, 0.1))
    gpu = GpuReading(1, "GPU", True, *[1.0] * 8, ("idle",), 1, 1)  # type: ignore[arg-type]  # all that a GPU may report
    host = HostReading(*[1.0] * len(fields(HostReading)))
    sink.write(HardwareEvent.of(1, HardwareReading((gpu,), host), 1.0, {gpu.index: 1.0}))
    sink.write(AlertEvent("disk", 1, "critical", "text", "log", count=1))
    sink.close()
    events = read(tmp_path)
    shown = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in shown.category] == list(layout())
    patterns = [pattern for category in shown.category for chart in category.chart for pattern in chart.multiline.tag]
    matched = {pattern for pattern in patterns if any(re.match(pattern, tag) for tag in events.Tags()["scalars"])}
    assert set(patterns) == matched


def test_runs_can_be_compared_by_their_settings_and_last_numbers(tmp_path: Path) -> None:
    for name, rate, last in (("a", 0.001, 2.0), ("b", 0.002, 1.5)):
        sink = TensorBoardSink(tmp_path / name / "tensorboard", None, 10)
        sink.begin(RunFacts(name, SETTINGS | {"optim": {"lr": rate, "kind": "adamw"}}))
        for number in range(1, 14):
            sink.write(step(number, loss_average=float(number)))
        sink.write(Evaluation(last, 4, 60).event(13))
        sink.close("finished" if name == "a" else "stopped")
    assert {path.name for path in (tmp_path / "a" / "tensorboard").iterdir() if path.is_dir()} == set(), "no run within the run"
    groups = session_groups(tmp_path)
    assert [group.hparams["optim.lr"].number_value for group in groups] == [0.001, 0.002]
    assert groups[0].hparams["optim.kind"].string_value == "adamw"
    assert [metric(group, "validation/loss") for group in groups] == [2.0, 1.5]
    assert [metric(group, "train/loss_average") for group in groups] == [13.0, 13.0]
    assert [group.sessions[0].status for group in groups] == [api_pb2.STATUS_SUCCESS, api_pb2.STATUS_UNKNOWN]


def session_groups(directory: Path) -> list[Any]:
    """What the HParams tab of TensorBoard shows of the runs in a directory, by learning rate."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(directory))
    multiplexer.Reload()
    context = TBContext(logdir=str(directory), data_provider=MultiplexerDataProvider(multiplexer, str(directory)))
    backend = backend_context.Context(context)
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        col_params=[api_pb2.ColParams(hparam="optim.lr", order=api_pb2.ORDER_ASC)],
        allowed_statuses=[api_pb2.STATUS_SUCCESS, api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING],
    )
    request_context = RequestContext()
    handler = list_session_groups.Handler(request_context, backend, "", request)
    return list(handler.run().session_groups)


def metric(group: Any, tag: str) -> float:
    [value] = [value.value for value in group.metric_values if value.name.tag == tag]
    return float(value)


def test_settings_are_flat_and_without_paths() -> None:
    assert hyper_parameters(SETTINGS) == {
        "seed": 1,
        "tf32": "False",
        "recipe": "none",
        "optim.lr": 0.001,
        "optim.kind": "adamw",
        "schedule.milestones": "[1, 2]",
    }


def test_texts_keep_their_line_breaks_and_alerts_their_rule(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.samples(5, (SampleEvent(5, "Once\n", "upon"),), None)
    sink.write(AlertEvent("disk", 6, "critical", "step 6: full", "stop", count=1))
    sink.close()
    events = read(tmp_path)
    assert texts(events, "sample") == ["    Once\n    upon"]
    assert texts(events, "alert") == ["**disk** (critical, stop): step 6: full"]
    assert [event.value for event in events.Scalars("health/alerts_disk")] == [1.0]


def test_a_text_that_is_no_unicode_is_shown_with_the_numbers_of_what_it_holds(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.samples(1, (SampleEvent(1, "a\udcff", "b"),), None)
    sink.write(AlertEvent("disk", 1, "critical", "a\udcff", "log", count=1))
    sink.write(Evaluation(2.0, 4, 60, by_source={"a\udcff": Score(1.0, 9)}).event(1))
    sink.close()
    events = read(tmp_path)
    assert texts(events, "sample") == [r"    a\udcffb"]
    assert texts(events, "alert") == [r"**disk** (critical, log): a\udcff"]
    assert r"validation_source/a\udcff" in events.Tags()["scalars"]


def test_a_histogram_is_shown_with_the_counts_that_were_measured(sink: TensorBoardSink, tmp_path: Path) -> None:
    layer = nn.Linear(30, 10, bias=False)
    with torch.no_grad():
        layer.weight.uniform_(-0.3, 0.6)
    layer.weight.grad = torch.zeros_like(layer.weight)
    observer = LayerObserver(layer, Group(0, 1, 0, torch.device("cpu")), 0, 1)
    observer.before_update(1)
    observer.after_update(1)
    reading = observer.reading(1)
    assert reading is not None
    sink.histograms(reading)
    sink.close()
    [event] = read(tmp_path).Histograms("weights/weight")
    shown = event.histogram_value
    assert shown.num == sum(shown.bucket) == 300
    assert shown.sum == pytest.approx(float(layer.weight.detach().sum()), rel=1e-4)
    values = layer.weight.detach().numpy()
    assert shown.min <= values.min()
    assert shown.max >= values.max()
    assert list(shown.bucket_limit)[-1] == 1.0
    low = -1.0
    for limit, count in zip(shown.bucket_limit, shown.bucket, strict=True):
        assert count == int(((values > low) & (values <= limit)).sum())
        low = limit


def test_hardware_curves_are_named_by_gpu_and_unit() -> None:
    lost = replace(GPU, index=2, answers=False, throttle=("hw_thermal",))
    points = HardwareEvent.of(1, HardwareReading((GPU, lost), HOST), None).points()
    assert points["gpu_1/temperature_c"] == 61.0
    assert (points["gpu_1/throttled"], points["gpu_2/throttled"]) == (0.0, 1.0)
    assert (points["gpu_1/answers"], points["gpu_2/answers"]) == (1.0, 0.0)
    assert points["host/private_mib"] == 1000.0
    assert "gpu_1/power_w" not in points
    assert "host/memory_growth_mb_per_1000_steps" not in points


def test_pictures_are_drawn_from_the_first_checkpoint_on(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.begin(RunFacts("a", SETTINGS, example_report(200)))
    sink.write(Evaluation(2.0, 4, 60, by_source={"code": Score(1.0, 40)}).event(0))
    assert read(tmp_path).Tags()["images"] == []
    sink.sync()
    assert set(read(tmp_path).Tags()["images"]) == {"data/document_lengths", "validation/perplexity_by_source"}
    sink.write(Evaluation(2.0, 4, 60, by_source={"code": Score(1.0, 40)}).event(1))
    sink.sync()
    assert len(read(tmp_path).Images("validation/perplexity_by_source")) == 2


def test_runs_are_compared_by_curves_that_exist() -> None:
    compared = {metric.curve for metric in metrics_of(TrainEvent).values() if metric.compared}
    assert compared <= set(step(1).points())


def test_the_data_is_shown_as_a_picture_if_its_report_is_there(sink: TensorBoardSink, tmp_path: Path) -> None:
    sink.begin(RunFacts("a", SETTINGS, example_report(200)))
    sink.sync()
    sink.close()
    [event] = read(tmp_path).Images("data/document_lengths")
    assert Image.open(io.BytesIO(event.encoded_image_string)).size == (800, 400)
    assert length_histogram({}) is None
    for tokens in (None, {}, {"histogram": None}, {"histogram": []}, {"histogram": [[1, 2, 0, 0]]}):
        assert length_histogram({"lengths": {"tokens": tokens}}) is None
    assert length_histogram({"lengths": None}) is None
    assert length_histogram({"lengths": {"tokens": {"p50": None, "histogram": [[1, 2, 3, 4], [2, 4, 1, 3]]}}}) is not None


@pytest.mark.parametrize("name", ["a$_$", "$", "$$", "\\$x$", "$\\frac$", "a\udcffb"])
def test_bars_have_the_names_of_the_groups_whatever_they_are(name: str) -> None:
    shown = perplexity_bars({name: Score(1.0, 9)}, "t")
    assert shown.shape == perplexity_bars({"plain": Score(1.0, 9)}, "t").shape


def test_the_text_of_a_name_is_drawn_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        RendererAgg, "draw_text", lambda _self, _context, _x, _y, text, *_others, **_more: drawn.append(text.replace(r"\$", "$"))
    )
    perplexity_bars({"a$_$b": Score(1.0, 9)}, "t")
    assert "a$_$b" in drawn


def test_bars_stand_for_the_perplexities_and_a_longer_one_is_a_higher_one() -> None:
    picture = perplexity_bars({"prose": Score(math.log(10), 1), "code": Score(math.log(5), 1), "bad": Score(math.inf, 1)}, "t")
    blue = (np.abs(picture.astype(int) - [0x34, 0x65, 0xA4]).sum(axis=2) < 10).sum(axis=1)
    lengths = [int(length) for length in np.unique(blue) if length > 20]
    assert len(lengths) == 2
    assert lengths[1] == pytest.approx(2 * lengths[0], rel=0.05)
    many = {f"source {number}": Score(float(number % 7), 10) for number in range(60)}
    assert perplexity_bars(many, "t").shape[0] == 1500
