"""The table of a compression, and the measurement of both speeds."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainer.compression import comparison
from trainer.compression.comparison import Measured, speeds, table
from trainer.inference.text_model import Continuation, TextModel


class Writer:
    """Writes one token for each prompt; each model takes a given time."""

    def __init__(self, name: str, seconds: float, clock: Clock) -> None:
        self._name, self._seconds, self._clock = name, seconds, clock

    def complete(self, prompts: tuple[str, ...], _sampling: Any) -> list[Continuation]:
        self._clock.order.append(self._name)
        self._clock.now += self._seconds * (5 if self._clock.order.count(self._name) == 1 else 1)  # the first round is slow
        return [Continuation(prompt, "x", (1,), "length") for prompt in prompts]


class Clock:
    def __init__(self) -> None:
        self.now, self.order = 0.0, list[str]()

    def perf_counter(self) -> float:
        return self.now


def measured(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> tuple[list[float], str]:
    clock = Clock()
    monkeypatch.setattr(comparison, "time", clock)
    writers = [Writer(name, one, clock) for name, one in zip("ab", seconds, strict=True)]
    return speeds(cast("list[TextModel]", writers)), "".join(clock.order)


def test_the_models_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = measured(monkeypatch, 0.25, 0.5)
    assert found == [16.0, 8.0]
    assert order == "ab" * (len(order) // 2)
    assert len(order) < 2 * 31  # 20 seconds are over before


def test_a_slow_model_has_one_round_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found, order = measured(monkeypatch, 100.0, 200.0)
    assert (found, order) == ([0.04, 0.02], "abab")


def test_a_fast_model_has_thirty_rounds_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(measured(monkeypatch, 0.125, 0.125)[1]) == 2 * 31


def test_the_table_has_each_value_before_and_after_and_its_change() -> None:
    lines = table(Measured(4 << 20, 4 << 20, 1000.0, 40.0), Measured(1 << 20, 4 << 20, 1100.0, 41.0)).splitlines()
    assert [line.split() for line in lines] == [
        ["before", "after", "change"],
        ["on", "disk", "4.0", "MiB", "1.0", "MiB", "-75.0%"],
        ["in", "memory", "4.0", "MiB", "4.0", "MiB", "+0.0%"],
        ["tokens/s", "1,000", "1,100", "+10.0%"],
        ["perplexity", "40", "41", "+2.5%"],
    ]
    unknown = Measured(1, 1, 1.0, None)
    assert table(unknown, unknown).splitlines()[-1].split() == ["perplexity", "-", "-", "no", "data"]
