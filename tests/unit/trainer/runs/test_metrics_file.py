import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import CheckpointError
from trainer.evaluation.tally import Evaluation
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.runs.events import SampleEvent, TrainEvent
from trainer.runs.metrics_file import read_events


def write(path: Path, *changes: tuple[int, dict[str, Any]]) -> Path:
    """What a run of three steps writes, with the given keys of the given lines changed."""
    sink = JsonLinesSink(path, None)
    sink.write(Evaluation(3.5, 4, 60).event(0))
    for step in range(1, 4):
        sink.write(
            TrainEvent(
                step=step,
                loss=2.5 / step,
                grad_norm=float("nan"),
                learning_rate=1e-3,
                targets=step * 10,
                tokens_per_s=1000.0,
                loader_wait_s=0.001,
            )
        )
    sink.write(SampleEvent(3, "", "text"))
    sink.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for line, facts in changes:
        events[line - 1] |= facts
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_events_are_read_in_their_order(tmp_path: Path) -> None:
    events = list(read_events(write(tmp_path / "metrics.jsonl")))
    assert [(type(event).__name__, event.step) for event in events] == [
        ("EvalEvent", 0),
        ("TrainEvent", 1),
        ("TrainEvent", 2),
        ("TrainEvent", 3),
        ("SampleEvent", 3),
    ]


def test_a_loss_that_is_not_finite_is_no_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", (3, {"loss": "nan", "loss_hex": "nan"}))
    assert len(list(read_events(path))) == 5


@pytest.mark.parametrize(
    ("line", "facts", "finding"),
    [
        (3, {"step": 3}, "line 3: step 3, but step 2 was expected"),
        (2, {"loss": 2.5000000001}, r"line 2: loss is 2\.5000000001, but loss_hex says 2\.5;"),
        (4, {"loss_hex": "0x1p+0"}, "line 4: loss is"),
        (1, {"val_loss": 3.25}, "line 1: val_loss is"),
        (1, {"step": 1}, "line 1: step 1, but step 0"),
        (2, {"loss_hex": None}, "line 2: not an event"),
    ],
)
def test_what_no_run_writes_is_named(tmp_path: Path, line: int, facts: dict[str, Any], finding: str) -> None:
    with pytest.raises(CheckpointError, match=finding):
        list(read_events(write(tmp_path / "metrics.jsonl", (line, facts))))


def test_a_line_that_is_missing_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[3:]))
    with pytest.raises(CheckpointError, match="line 3: step 3, but step 2"):
        list(read_events(path))


def test_a_line_that_is_no_json_is_named_unless_it_is_a_torn_last_one(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl")
    content = path.read_text()
    path.write_text(content + '{"event": "train", "st')
    assert len(list(read_events(path))) == 5
    path.write_text(content.replace('{"event": "train"', '"event": "train"', 1))
    with pytest.raises(CheckpointError, match="line 2: not an event"):
        list(read_events(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: missing"):
        list(read_events(tmp_path / "metrics.jsonl"))
