import io
import json
import math
from pathlib import Path

import pytest

from trainer.evaluate import Evaluation
from trainer.metrics import JsonLinesSink, StepMetrics, TerminalSink


def step(number: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(number, 100, loss, 0.5, 1e-3, number * 10, 1000.0, None, 0.001)


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_loss_is_kept_exactly(tmp_path: Path) -> None:
    loss = 2.1234567890123457
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", None)
    sink.train(step(1, loss))
    sink.close()
    [event] = events(tmp_path / "metrics.jsonl")
    assert float.fromhex(str(event["loss_hex"])) == loss
    assert event["event"] == "train"


def test_after_a_resume_every_step_appears_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, None)
    for number in range(1, 8):
        sink.train(step(number))
    sink.evaluation(5, Evaluation(2.0, 4, 60))
    sink.close()
    with path.open("a") as file:
        file.write('{"event": "train", "step": 8, "lo')  # killed while writing
    resumed = JsonLinesSink(path, 5)
    for number in range(6, 9):
        resumed.train(step(number))
    resumed.close()
    assert [event["step"] for event in events(path) if event["event"] == "train"] == list(range(1, 9))
    assert [event["step"] for event in events(path) if event["event"] == "eval"] == [5]


def test_a_fresh_start_keeps_nothing_of_a_run_that_was_never_saved(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonLinesSink(path, None)
        sink.evaluation(0, Evaluation(5.0, 4, 60))
        sink.close()
    assert len(events(path)) == 1


def test_a_number_that_is_not_finite_stays_visible_in_valid_json(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", None)
    sink.train(step(1, math.nan))
    sink.close()
    assert events(tmp_path / "metrics.jsonl")[0]["loss"] == "nan"


def test_without_a_terminal_there_is_one_line_every_few_steps() -> None:
    stream = io.StringIO()
    sink = TerminalSink(0, 100, 10, stream)
    for number in range(1, 101):
        sink.train(step(number))
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", *(f"{number}/100" for number in range(10, 101, 10))]
    assert "loss 2.5000" in lines[0]


def test_perplexity_of_a_hopeless_model_is_infinite() -> None:
    assert Evaluation(1e4, 1, 1).perplexity == math.inf
    assert Evaluation(math.log(50), 1, 1).perplexity == pytest.approx(50)
