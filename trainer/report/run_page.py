"""The page about one run: its results as values. `run_page.jinja` has the text and the tables."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from common.html.chart import measured
from common.html.drawing import draw
from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from common.text import count, duration, rate, share, shortened, size
from common.untrusted import number
from trainer.report.charts import all_charts, group_titles, hardware_charts, hardware_curves, loss_window, smoothed
from trainer.report.differences import differences, recipe_of, set_values, worded
from trainer.report.recorded_run import RecordedRun, part
from trainer.runs.events import HardwareEvent, MeasuresEvent, SampleEvent, SaveEvent, ScoresEvent

T = TypeVar("T")

_STATUS = {"finished": "finished", "stopped": "stopped", "failed": "failed", "training": "no end recorded"}
_MAX_ALERTS = 200
_MAX_EVALUATIONS = 40
_MAX_SAMPLES = 8
_MAX_LABELS = 20
_MAX_LISTED = 200
_MAX_SCORES = 12
_MAX_SHOWN_CHARS = 4000


def render_report(run: RecordedRun) -> str:
    recipe, devices = recipe_of(run.config), hardware_curves(run)
    kinds = Counter(event.rule for event in run.alerts if event.rule)
    found = [replace(event, text=shortened(event.text, _MAX_SHOWN_CHARS)) for event in reversed(run.of(SampleEvent))]
    newest = [event for event in found if event.step == found[0].step]
    return render_page(
        TEMPLATES,
        "run_page.jinja",
        script=True,
        title=run.name,
        introduction=introduction(run),
        run=run,
        headline=_headline(run),
        charts=all_charts(run),
        alert_kinds="; ".join(f"{rule}: {times:,}" for rule, times in kinds.most_common()),
        max_alerts=_MAX_ALERTS,
        evaluations=_spread(run.evaluations, _MAX_EVALUATIONS, run.best),
        groups_by=[(words, scores) for by, words in group_titles().items() if (scores := getattr(run.evaluations[-1], by))]
        if run.evaluations
        else [],
        labels=_labels(run),
        newest_samples=newest[:_MAX_SAMPLES][::-1],
        older_samples=_spread(found[len(newest) :], _MAX_SAMPLES),
        scores=_scores(run),
        speed=_speed(run),
        hardware_names=list(
            dict.fromkeys(str(gpu["name"]) for event in run.of(HardwareEvent) for gpu in event.gpus if gpu.get("name"))
        ),
        hardware_charts=hardware_charts(devices),
        constant_hardware=[
            (f"{place}: {name.replace('_', ' ')}", float(curve.y_N[-1]))
            for (_, name), each in devices.items()
            for place, curve in each.items()
            if len(np.unique(curve.y_N)) == 1
        ],
        validation_losses={event.step: event.val_loss for event in run.evaluations},
        recipe=recipe,
        changes=differences(run.config, recipe),
        all_settings=sorted((name, worded(value)) for name, value in set_values(run.config).items()),
        commands=_commands(run),
    )


def introduction(run: RecordedRun) -> str:
    model, optimizer = part(run.config, "model"), part(run.config, "optim")
    identity, environment = run.record.identity, run.record.environment
    num_weights = next((saved.num_weights for saved in reversed(run.checkpoints) if saved.num_weights is not None), None)
    weights = f"{num_weights / 1e6:,.2f}M weights" if num_weights else "no checkpoint yet"
    if run.record.trained_weights is not None:
        weights += f", of which {_short(run.record.trained_weights)} are trained"
    ranks = environment.world_size
    gpus = ", ".join(dict.fromkeys(environment.gpus))
    device = str(identity.get("device", "cpu"))
    device = (environment.processor or device) if device.startswith("cpu") else gpus or device
    reason = run.record.ended_by
    ending = f" It {_STATUS.get(run.record.status, run.record.status)} at step {run.record.step}: {reason}" if reason else ""
    own_code = ", with an extension" if identity.get("extension") else ""
    return (
        f"A decoder of {model.get('layers')} layers, width {model.get('width')} ({weights}), trained with {optimizer.get('kind')} "
        f"in {run.config.get('precision')} by {ranks} rank{'s' * (ranks != 1)} on {device}{own_code}.{ending}"
    )


def _headline(run: RecordedRun) -> list[tuple[str, str, str]]:
    best, mfu = run.best, run.mfu
    tokens, average, last = run.curve("targets").last, smoothed(run, "loss").last, run.curve("loss").last
    window = loss_window(run)
    steps = number(part(run.config, "limits").get("steps"))
    where = "no evaluation yet"
    if best and run.has_perplexity:
        where = f"step {best.step:,}, perplexity {_decimal(best.perplexity)}"
    elif best:
        words = next((event.words for event in run.of(MeasuresEvent) if event.step == best.step), "not measured")
        where = f"step {best.step:,}, nats per {run.target}; {words}"
    return [
        (
            "status",
            _STATUS.get(run.record.status, run.record.status),
            f"step {run.step:,}" + (f" of {steps:,.0f}" if steps else ""),
        ),
        ("training loss", _decimal(average), f"mean of {window} steps; last {_decimal(last)}" if window > 1 else "last step"),
        ("best validation loss", _decimal(best.val_loss if best else None), where),
        ("tokens", _short(tokens), "trained on, repeats counted"),
        ("training time", duration(run.seconds) if tokens else UNKNOWN, "without evaluations and saves"),
        ("tokens a second", or_unknown(rate)(run.tokens_per_s), f"median; MFU {'unknown' if mfu is None else share(mfu)}"),
        ("alerts", count(len(run.alerts)), "listed below" if run.alerts else "no rule was broken"),
    ]


@dataclass(frozen=True)
class _Table:
    columns: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[Any]]] = ()
    words: str = ""


def _scores(run: RecordedRun) -> _Table:
    chosen = _spread([(event.step, event.numbers) for event in run.of(ScoresEvent) if event.numbers], _MAX_SCORES)
    names = dict.fromkeys(name for event in run.of(ScoresEvent) for name in event.numbers)
    rows = [(name.replace("_", " "), [values.get(name) for _, values in chosen]) for name in names]
    return _Table([f"step {step:,}" for step, _ in chosen], rows, "Scores of the samples")


def _labels(run: RecordedRun) -> dict[str, _Table]:
    """Return the measures by step, and those of each label and the confusion at the newest step, unless it has too many labels."""
    if not (found := run.of(MeasuresEvent)):
        return dict.fromkeys(("steps", "each", "confusion"), _Table())
    newest, at = found[-1], f"at step {found[-1].step:,}"
    columns = [name for name in newest.values if "/" not in name]
    kinds, names = (list(dict.fromkeys(name.partition("/")[end] for name in newest.values if "/" in name)) for end in (0, 2))
    predicted = sorted({name for row in newest.confusion.values() for name in row} | newest.confusion.keys())
    tables = {
        "steps": _Table(
            [name.replace("_", " ") for name in columns],
            [(f"{event.step:,}", [event.values.get(name) for name in columns]) for event in _spread(found, _MAX_EVALUATIONS)],
        ),
        "each": _Table(
            kinds,
            [(name, [newest.values.get(f"{kind}/{name}") for kind in kinds]) for name in names[:_MAX_LISTED]],
            f"Each label {at}",
        ),
        "confusion": _Table(
            predicted,
            [(true, [newest.confusion.get(true, {}).get(name, 0) for name in predicted]) for true in predicted],
            f"Confusion {at}",
        ),
    }
    return tables if len(predicted) <= _MAX_LABELS else tables | {"confusion": _Table()}


def _speed(run: RecordedRun) -> _Table:
    """Return the percentiles 5, 50 and 95 of each measure."""
    tokens_per_s, wait = run.curve("tokens_per_s").finite, run.curve("loader_wait_s").finite
    if not len(tokens_per_s):
        return _Table()
    stalls = [stall for event in run.of(SaveEvent) if (stall := event.stall_s) is not None]
    words = [f"{duration(run.seconds)} of training in {count(len(tokens_per_s))} steps"]
    if len(wait) and run.seconds:
        words.append(f"{share(float(wait.sum()) / run.seconds)} of it waiting for data")
    if stalls:
        words.append(f"{len(stalls):,} saves delayed it by {duration(sum(stalls))} in total, {duration(max(stalls))} at most")
    measures: list[tuple[str, NDArray[np.float64], Callable[[float], str]]] = [
        ("tokens a second", tokens_per_s, rate),
        ("model FLOPs utilisation", run.curve("mfu").finite, share),
        ("seconds a step", run.curve("seconds").finite, measured),
        ("seconds a step waited for data", wait, measured),
    ]
    rows = [
        (name, [form(value) for value in np.percentile(values, (5, 50, 95)).tolist()])
        for name, values, form in measures
        if len(values)
    ]
    return _Table(("5 % are below", "median", "5 % are above"), rows, "; ".join(words) + ".")


def _spread(values: Sequence[T], most: int, wanted: T | None = None) -> list[T]:
    """Return at most `most` values, evenly spread, and `wanted`. The first and the last are among them."""
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int).tolist()
    return [value for place, value in enumerate(values) if place in places or value is wanted]


def _commands(run: RecordedRun) -> list[tuple[str, str]]:
    path, data = shlex.quote(str(run.path)), shlex.quote(str(run.config.get("data", "DATA")))
    ranks = run.record.environment.world_size
    launch = "trainer train" if ranks == 1 else f"PET_NPROC_PER_NODE={ranks} entrypoints/train"
    return [
        ("check all digests: record, checkpoints, metrics, ledger, data", f"trainer verify {path} --level integrity"),
        ("train ten steps again and compare all bits", f"trainer verify {path} --replay 10"),
        ("prove the rows of every step", f"trainer audit {path}"),
        ("repeat the whole run in a new directory", f"{launch} --recipe {path}/config.toml --data {data} --run {path}-again"),
    ]


def _written(form: Callable[[float], str]) -> Callable[[object], str]:
    return lambda value: or_unknown(form)(number(value))


_decimal = or_unknown(measured)
_short = or_unknown(lambda value: rate(value) if value >= 1e6 else count(value))

TEMPLATES = template_environment(
    Path(__file__).parent,
    count=_written(count),
    decimal=_written(measured),
    duration=duration,
    rate=_written(rate),
    share=_written(share),
    size=_written(size),
    status=lambda status: _STATUS.get(status, status),
    worded_items=lambda values: [(name, worded(value)) for name, value in values.items()],
)
TEMPLATES.globals.update(draw=draw, part=part)
