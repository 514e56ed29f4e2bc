import json
import math
from typing import Any, get_args

import pytest

from common.files import plain
from tests.support.run_example import HOSTILE, example_events
from trainer.machine.gpus import GpuReading
from trainer.machine.host import HostReading
from trainer.machine.sampler import HardwareReading
from trainer.run.events import (
    AlertEvent,
    EndEvent,
    EvalEvent,
    Event,
    HardwareEvent,
    LayersEvent,
    SampleEvent,
    SaveEvent,
    Score,
    ScoresEvent,
    TrainEvent,
    UnknownEvent,
    parse_event,
)

HOST = HostReading(1500.0, 1000.0, 16000.0, None, 100.0)
EVENTS: list[Event] = [
    TrainEvent(step=1, loss=2.5, grad_norm=math.inf, learning_rate=1e-3, targets=10, tokens_per_s=100.0, loader_wait_s=0.5),
    EvalEvent(2, 2.5, 60, 1.5, {"source": {"code": Score(1.0, 40, 70)}, "kind": {}, "length": {}}),
    SampleEvent(3, "Once ", "upon"),
    ScoresEvent(4, {"distinct_1": 0.5, "mtld": None}),
    LayersEvent(5, {"norm": 1.0}, {"norm": 0.0}, {"norm": math.inf}),
    HardwareEvent.of(6, HardwareReading((GpuReading(0, "GPU", temperature_c=61.0),), HOST, (79,)), 3.5),
    SaveEvent(7, 0.25),
    AlertEvent("spike", 8, "warning", "loss 9 is above 3", "log", 9.0),
    EndEvent(9, "stopped", "SIGTERM"),
    UnknownEvent(10, {"event": "of another version", "step": 10, "x": [1]}),
]


def test_every_event_is_among_these() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_what_is_written_is_read_back(event: Event) -> None:
    assert parse_event(json.loads(json.dumps(plain(event.to_json())))) == event


@pytest.mark.parametrize("event", [*example_events(), *example_events(20, HOSTILE)], ids=lambda event: event["event"])
def test_an_event_without_its_optional_fields_is_read(event: dict[str, Any]) -> None:
    kept = {name: value for name, value in event.items() if name in ("event", "step", "loss", "grad_norm", "val_loss")}
    assert parse_event(kept).step == parse_event(event).step == event["step"]


def test_a_field_that_no_run_writes_and_that_no_reader_needs_is_left_out() -> None:
    values = ([], {}, "x", None, 5, True, 10**400, {"a": 5, "b": {"loss": "x"}, "c": []})
    for value in values:
        for event in EVENTS:
            written = plain(event.to_json())
            for name in written.keys() - {"event", "step", "loss", "grad_norm", "val_loss", "tokens", "rule"}:
                assert parse_event(written | {name: value}).step == event.step
