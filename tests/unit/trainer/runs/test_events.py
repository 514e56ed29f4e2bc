import json
import math
from typing import Any

import pytest

from tests.support.run_example import HOSTILE, example_events
from trainer.machine.sampler import GpuReading, HardwareReading, HostReading
from trainer.runs.events import (
    EVENTS,
    AlertEvent,
    EndEvent,
    EvalEvent,
    Event,
    HardwareEvent,
    LayersEvent,
    MeasuresEvent,
    SampleEvent,
    SaveEvent,
    ScalarsEvent,
    Score,
    ScoresEvent,
    TrainEvent,
    UnknownEvent,
    parse_event,
)

HOST = HostReading(1500.1234, 1000.0, 16000.0, None, 100.0)
WRITTEN: list[tuple[Event, str]] = [
    (
        TrainEvent(
            step=1,
            loss=0.5,
            grad_norm=math.inf,
            learning_rate=1e-3,
            targets=10,
            tokens_per_s=100.123,
            mfu=0.123456,
            seconds=0.12345678,
            loader_wait_s=0.00012345678,
        ),
        '{"event": "train", "step": 1, "loss": 0.5, "loss_hex": "0x1.0000000000000p-1", "loss_average": null, '
        '"perplexity": 1.6487212707001282, "grad_norm": "inf", "lr": 0.001, "muon_lr": null, "tokens": 10, "tokens_per_s": 100.1, '
        '"mfu": 0.1235, "seconds": 0.123457, "loader_wait_s": 0.000123, "monitor_s": null}',
    ),
    (
        EvalEvent(2, 0.5, 60, 1.5, by_source={"code": Score(0.0, 40, 70)}),
        '{"event": "eval", "step": 2, "val_loss": 0.5, "val_loss_hex": "0x1.0000000000000p-1", "perplexity": 1.6487212707001282, '
        '"targets": 60, "bits_per_byte": 1.5, "by_source": {"code": {"loss": 0.0, "perplexity": 1.0, "bits_per_byte": 0.0, '
        '"targets": 40, "bytes": 70}}}',
    ),
    (
        EvalEvent(3, 0.5, 60, train_loss=0.25, gap=0.25, trend=-1.5),
        '{"event": "eval", "step": 3, "val_loss": 0.5, "val_loss_hex": "0x1.0000000000000p-1", "perplexity": 1.6487212707001282, '
        '"targets": 60, "train_loss": 0.25, "gap": 0.25, "trend_per_1000_steps": -1.5}',
    ),
    (
        EvalEvent(4, 0.5, 60, by_source={"a": Score(0.5, 60, has_perplexity=False)}, has_perplexity=False),
        '{"event": "eval", "step": 4, "val_loss": 0.5, "val_loss_hex": "0x1.0000000000000p-1", "targets": 60, '
        '"by_source": {"a": {"loss": 0.5, "bits_per_byte": null, "targets": 60, "bytes": 0}}}',
    ),
    (
        TrainEvent(
            step=5,
            loss=0.5,
            grad_norm=1.0,
            learning_rate=1e-3,
            targets=10,
            tokens_per_s=1.0,
            loader_wait_s=0.0,
            measures={"margin": 0.25},
            has_perplexity=False,
        ),
        '{"event": "train", "step": 5, "loss": 0.5, "loss_hex": "0x1.0000000000000p-1", "loss_average": null, "grad_norm": 1.0, '
        '"lr": 0.001, "muon_lr": null, "tokens": 10, "tokens_per_s": 1.0, "mfu": null, "seconds": null, "loader_wait_s": 0.0, '
        '"monitor_s": null, "measures": {"margin": 0.25}}',
    ),
    (SampleEvent(3, "Once ", "upon"), '{"event": "sample", "step": 3, "prompt": "Once ", "text": "Once upon"}'),
    (ScoresEvent(4, {"mtld": None, "distinct_1": 0.5}), '{"event": "scores", "step": 4, "mtld": null, "distinct_1": 0.5}'),
    (
        ScalarsEvent(3, "on_step_end", {"own/curve": 0.5, "n": math.nan}),
        '{"event": "scalars", "step": 3, "hook": "on_step_end", "values": {"own/curve": 0.5, "n": "nan"}}',
    ),
    (
        MeasuresEvent(5, {"accuracy": 0.5}, {"c": {"c": 1, "python": 1}}),
        '{"event": "measures", "step": 5, "values": {"accuracy": 0.5}, "confusion": {"c": {"c": 1, "python": 1}}}',
    ),
    (
        LayersEvent(5, {"norm": 1.0}, {"norm": 0.0}, {"norm": math.inf}),
        '{"event": "layers", "step": 5, "gradient_norm": {"norm": 1.0}, "weight_norm": {"norm": 0.0}, '
        '"update_ratio": {"norm": "inf"}}',
    ),
    (
        HardwareEvent.of(6, HardwareReading((GpuReading(0, "GPU", power_w=61.0, throttle=()),), HOST, (79,)), 3.14159),
        '{"event": "hardware", "step": 6, "gpus": [{"index": 0, "name": "GPU", "answers": true, "power_w": 61.0, "throttle": []}], '
        '"host": {"rss_mib": 1500.123, "private_mib": 1000.0, "available_mib": 16000.0, "disk_free_gb": 100.0}, "xids": [79], '
        '"host_memory_mb_per_1000_steps": 3.142}',
    ),
    (SaveEvent(7, 0.123456789), '{"event": "save", "step": 7, "stall_s": 0.123457}'),
    (
        AlertEvent("spike", 8, "warning", "loss 9 is above 3", "log", 9.0),
        '{"event": "alert", "rule": "spike", "step": 8, "severity": "warning", "message": "loss 9 is above 3", "action": "log", '
        '"value": 9.0, "threshold": null}',
    ),
    (EndEvent(9, "stopped", "SIGTERM"), '{"event": "end", "step": 9, "status": "stopped", "ended_by": "SIGTERM"}'),
    (UnknownEvent(10, {"event": "new", "step": 10, "x": [1]}), '{"event": "new", "step": 10, "x": [1]}'),
]
WRITTEN_EVENTS = [event for event, _ in WRITTEN]


def test_every_event_is_among_these() -> None:
    assert {type(event) for event in WRITTEN_EVENTS} == {*EVENTS.values(), UnknownEvent}


@pytest.mark.parametrize(("event", "line"), WRITTEN, ids=[type(event).__name__ for event in WRITTEN_EVENTS])
def test_an_event_has_one_form_in_the_file_and_is_read_back_from_it(event: Event, line: str) -> None:
    assert json.dumps(event.to_json()) == line
    again = parse_event(json.loads(line))
    assert type(again) is type(event)
    assert json.dumps(again.to_json()) == line


@pytest.mark.parametrize("event", [*example_events(), *example_events(20, HOSTILE)], ids=lambda event: event["event"])
def test_an_event_without_its_optional_fields_is_read(event: dict[str, Any]) -> None:
    kept = {name: value for name, value in event.items() if name in ("event", "step", "loss", "grad_norm", "val_loss")}
    assert parse_event(kept).step == parse_event(event).step == event["step"]


def test_a_field_that_no_run_writes_and_that_no_reader_needs_is_left_out() -> None:
    values = ([], {}, "x", None, 5, True, 10**400, {"a": 5, "b": {"loss": "x"}, "c": []})
    for value in values:
        for event in WRITTEN_EVENTS:
            written = event.to_json()
            for name in written.keys() - {"event", "step", "loss", "grad_norm", "val_loss", "tokens", "rule"}:
                assert parse_event(written | {name: value}).step == event.step
