from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from string import Formatter
from typing import IO, Any, Literal

from tqdm import tqdm

from common.terminal import Colour, printable, write_line
from common.text import duration, rate, shortened
from trainer.metrics.sinks.base import Sink, StepMetrics
from trainer.runs.events import AlertEvent, EvalEvent, Event, SampleEvent, ScoresEvent
from trainer.runs.metric import metrics_of
from trainer.runs.metrics_file import CutOff

_SAMPLE_CHARS, _PROMPT_CHARS = 120, 40
_SCORES = {"perplexity": "perplexity", "repetition": "repetition", "distinct_2": "distinct pairs"}
_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_WITHOUT_END = "step {n_fmt}{postfix}"


class TerminalSink(Sink):
    """Shows a progress bar on a terminal, and elsewhere one line every few steps, which begins with the time that `now` returns."""

    def __init__(
        self,
        resume_step: int,
        last_step: int | None,
        every_steps: int,
        stream: IO[str] | None = None,
        now: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._stream = stream or sys.stderr
        self._every_steps = every_steps
        self._now = now
        self._lowest = math.inf
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            form = _WITHOUT_END if last_step is None else _BAR
            self._bar = tqdm(
                total=last_step, initial=resume_step, unit="step", file=self._stream, dynamic_ncols=True, bar_format=form
            )

    def write(self, event: Event) -> None:
        match event:
            case StepMetrics():
                self._train(event)
            case AlertEvent():
                self._line(printable(f"{event.severity}: {event.message}"), "red" if event.severity == "critical" else "yellow")
            case _:
                if texts := _texts(event, "terminal"):
                    is_best = isinstance(event, EvalEvent) and event.val_loss < self._lowest
                    if isinstance(event, EvalEvent):
                        self._lowest = min(self._lowest, event.val_loss)
                    self._line(f"step {event.step}{texts}", "green" if is_best else None)

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        if samples:
            prompt = shortened(" ".join(samples[0].prompt.split()), _PROMPT_CHARS, from_end=True)
            text = " ".join(printable(f"{prompt} \u2192 {samples[0].text}" if prompt else samples[0].text).split())
            self._line(f"step {step}  sample: {shortened(text, _SAMPLE_CHARS)}")
        found = {} if scores is None else {label: scores.numbers[name] for name, label in _SCORES.items() if name in scores.numbers}
        if found:
            texts = ", ".join(f"{label} {value:.3g}" for label, value in found.items())
            self._line(f"step {step}  scores of the samples: {texts}")

    def rewind(self, cut_off: CutOff) -> None:
        if self._bar is not None:
            self._bar.n = cut_off.step
            self._bar.refresh()

    def close(self, status: str | None = None) -> None:
        if self._bar is not None:
            self._bar.close()

    def _train(self, metrics: StepMetrics) -> None:
        if self._bar is not None:
            if metrics.last_step:  # known, or earlier than it was, once the time that is left decides about the end
                self._bar.total = metrics.last_step
                self._bar.bar_format = _BAR
            self._bar.update()
            self._bar.set_postfix_str(_time(metrics) + _texts(metrics, "bar"), refresh=False)
        elif metrics.is_due(self._every_steps):
            of_total = f"/{metrics.last_step}" if metrics.last_step else ""
            self._line(f"step {metrics.step}{of_total}{_texts(metrics, 'terminal')}  {_time(metrics)}")

    def _line(self, text: str, colour: Colour | None = None) -> None:
        write_line(text if self._bar is not None else f"{self._now()}  {text}", self._stream, colour)


def _time(metrics: StepMetrics) -> str:
    left = "" if metrics.left_s is None else f", about {duration(metrics.left_s)} left"
    return f"{duration(metrics.run_s)} so far{left}"


def _texts(event: Event, place: Literal["terminal", "bar"]) -> str:
    found = ((getattr(metric, place), getattr(event, name)) for name, metric in metrics_of(type(event)).items())
    return "".join(_FORMATTER.format(text, value=value, event=event) for text, value in found if text and value is not None)


class _Formatter(Formatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec == "rate":
            return rate(value)
        return f"{value * 1e3:.1f} ms" if format_spec == "ms" else super().format_field(value, format_spec)


_FORMATTER = _Formatter()
