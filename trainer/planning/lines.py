"""The forecast of a run in words, which fits a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from common.text import count, duration, rate, shortened, size, visible
from trainer.model.lora import num_adapter_weights
from trainer.planning.forecast import Forecast

_COLUMNS = 79
_NAME_COLUMNS = 12
_PATH_CHARS = 60


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
