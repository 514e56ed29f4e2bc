"""The facts about a training before its first step, and the same in words, which fit a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from common.text import count, duration, rate, shortened, size, visible
from data_pipeline.dataset.manifest import Manifest
from trainer.config import TrainConfig
from trainer.model.lora import num_adapter_weights
from trainer.model.memory_estimate import MemoryEstimate
from trainer.planning.checkpoints import DiskSpace, checkpoint_bytes, frozen_bytes, most_checkpoints, space_of
from trainer.runs.layout import CHECKPOINTS
from trainer.runs.state import Progress

_COLUMNS = 79
_NAME_COLUMNS = 12
_PATH_CHARS = 60
_FORWARD_SHARE = 1 / 3  # of the time of a forward and a backward pass


@dataclass(frozen=True)
class Forecast:
    config: TrainConfig
    manifest: Manifest
    num_steps: int  # until a limit on steps, epochs or tokens ends the run; 0 if only `limits.minutes` does
    num_weights: int
    num_train_rows: int
    num_val_rows: int
    done: Progress  # by an earlier start of the run
    memory: MemoryEstimate  # of one rank

    @cached_property
    def disk(self) -> DiskSpace:
        return space_of(self.config.run / CHECKPOINTS)

    @property
    def bytes_per_checkpoint(self) -> int:
        return checkpoint_bytes(self.config, self.manifest.vocab_size)

    @property
    def num_checkpoints(self) -> int:
        """The most checkpoints that are on the disk at one time."""
        return most_checkpoints(self.config.checkpoint, self.num_steps)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the frozen weights, which all checkpoints share."""
        return frozen_bytes(self.config, self.manifest.vocab_size)

    @property
    def steps_left(self) -> int:
        return max(0, self.num_steps - self.done.step)

    def num_epochs(self, num_steps: int) -> float:
        return num_steps * self.config.batch.global_batch_size / self.num_train_rows

    def num_tokens(self, num_steps: int) -> int:
        tokens = sum(shard.tokens for shard in self.manifest.shards if shard.split == "train")
        return round(tokens * self.num_epochs(num_steps))

    @property
    def rows_per_evaluation(self) -> int:
        return min(self.num_val_rows, self.config.eval.max_rows or self.num_val_rows)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the checkpoints take on the disk at most, with those that exist already."""
        return max(self.disk.held, self.shared_bytes + self.num_checkpoints * self.bytes_per_checkpoint)

    def expected_steps(self, step_s: float) -> int:
        """Return the steps until the end of the run, at the first limit, if a step takes `step_s` seconds."""
        minutes = self.config.limits.minutes
        if minutes is None:
            return self.steps_left
        each_s = step_s + self._evaluation_s(step_s) / self.config.eval.every_steps
        left_s = max(0.0, 60 * minutes - self.done.seconds)
        within = max(1, math.floor((left_s - 2 * self._evaluation_s(step_s)) / each_s))
        return min(within, self.steps_left) if self.num_steps else within

    def seconds(self, step_s: float) -> float:
        """Return the time until the end of the run, with evaluations, if a step takes `step_s` seconds."""
        minutes = self.config.limits.minutes
        num_evaluations = 2 + self.steps_left // self.config.eval.every_steps  # the first and the last step are evaluated too
        seconds = self.steps_left * step_s + num_evaluations * self._evaluation_s(step_s) if self.num_steps else math.inf
        return min(seconds, math.inf if minutes is None else max(0.0, 60 * minutes - self.done.seconds))

    def _evaluation_s(self, step_s: float) -> float:
        return self.rows_per_evaluation / self.config.batch.global_batch_size * step_s * _FORWARD_SHARE


def plan_lines(forecast: Forecast, *, place: str, free_bytes: int, step_s: float | None) -> list[str]:
    """`place`: device, ranks and number format. `free_bytes`: for one rank. `step_s`: measured; None if that failed."""
    config, manifest, model = forecast.config, forecast.manifest, forecast.config.model
    batch, micro = config.batch, config.batch.micro_rows
    folder = shortened(str(config.data), _PATH_CHARS, from_end=True)
    num_adapted = num_adapter_weights(config.model, config.lora)
    adapters = f", {rate(num_adapted)} of them in adapters" if num_adapted else ""
    evaluations = f"every {count(config.eval.every_steps)} steps, on {_counted(forecast.rows_per_evaluation, 'row')}"
    lines = {
        "data": f"{folder}: {_counted(forecast.num_train_rows, 'training row')} and "
        f"{_counted(forecast.num_val_rows, 'validation row')} of {count(manifest.row_length)} tokens",
        "tokenizer": f"{manifest.tokenizer_kind}, {count(manifest.vocab_size)} tokens",
        "model": f"{rate(forecast.num_weights)} weights{adapters}: {_counted(model.layers, 'layer')}, "
        f"width {count(model.width)}, {_counted(model.heads, 'head')}",
        "runs on": place,
        "batch": f"{_counted(batch.global_batch_size, 'row')} ({rate(batch.global_batch_size * manifest.row_length)} tokens) for "
        f"each step, in micro-batches of {_counted(micro, 'row')}",
        "length": _length(forecast, step_s),
        "evaluation": evaluations,
        "memory": f"about {size(forecast.memory.total)} for each rank, {_free(free_bytes, forecast.memory.total)}",
        "disk": _disk(forecast),
        "time": _time(forecast, step_s),
    }
    return _table(lines)


def brief_lines(forecast: Forecast) -> list[str]:
    memory = f"about {size(forecast.memory.total)} for each rank"
    return _table({"length": _length(forecast, None), "memory": memory, "disk": _disk(forecast)})


def time_lines(forecast: Forecast, step_s: float) -> list[str]:
    return _table({"time": _time(forecast, step_s)})


def _table(lines: Mapping[str, str]) -> list[str]:
    """Return named texts as lines of at most 79 columns, the names in the first column."""
    wrapped = []
    for name, text in lines.items():
        parts = textwrap.wrap(visible(text), _COLUMNS - _NAME_COLUMNS, break_long_words=True, break_on_hyphens=False)
        wrapped += [f"{name if number == 0 else '':<{_NAME_COLUMNS}}{part}" for number, part in enumerate(parts)]
    return wrapped


def _length(forecast: Forecast, step_s: float | None) -> str:
    minutes, steps, done = forecast.config.limits.minutes, forecast.num_steps, forecast.done.step
    ends = "" if minutes is None else f"limits.minutes = {minutes:g}"
    if step_s is not None and minutes is not None and (within := done + forecast.expected_steps(step_s)) != steps:
        return f"about {_steps(forecast, within)}, until {ends} ends the run"
    if not steps:
        return f"until {ends} ends the run"
    return f"{_steps(forecast, steps)}{f', unless {ends} ends the run before' if ends and step_s is None else ''}"


def _steps(forecast: Forecast, num_steps: int) -> str:
    epochs = forecast.num_epochs(num_steps)
    begun = f", of which {count(forecast.done.step)} are done" if forecast.done.step else ""
    passes = f"{epochs:.3g} epoch{'s' * (epochs != 1)}"
    return f"{_counted(num_steps, 'step')}{begun}: {rate(forecast.num_tokens(num_steps))} tokens, {passes}"


def _disk(forecast: Forecast) -> str:
    copies = _counted(forecast.num_checkpoints, "checkpoint")
    shared = f" and {size(forecast.shared_bytes)} that they share" if forecast.shared_bytes else ""
    needed = f"up to {copies} of {size(forecast.bytes_per_checkpoint)}{shared}: {size(forecast.disk_bytes)}"
    held = f", {size(forecast.disk.held)} of it written" if forecast.disk.held else ""
    return f"{needed}{held}; {_free(forecast.disk.free, forecast.disk_bytes - forecast.disk.held)}"


def _free(free_bytes: int, needed_bytes: int) -> str:
    return f"{'only ' if free_bytes < needed_bytes else ''}{size(free_bytes)} free"


def _time(forecast: Forecast, step_s: float | None) -> str:
    if step_s is None:
        return "not measured: the steps need more memory than one rank has"
    steps, each = _counted(forecast.expected_steps(step_s), "step"), f"{1000 * step_s:.0f} ms" if step_s < 1 else duration(step_s)
    return f"about {duration(forecast.seconds(step_s))} for {steps}, at {each} for each, with evaluations"


def _counted(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'s' * (number != 1)}"
