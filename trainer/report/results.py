"""The results of a run as values for its page: headline, alerts, evaluations, samples, speed, hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.html.chart import Chart, measured
from common.html.page import UNKNOWN, or_unknown
from common.text import count, duration, rate, share, shortened
from common.untrusted import number
from trainer.report.charts import group_titles, hardware_charts, hardware_curves, loss_window, smoothed
from trainer.report.recorded_run import RecordedRun, part
from trainer.runs.events import EvalEvent, HardwareEvent, MeasuresEvent, SampleEvent, SaveEvent, Score, ScoresEvent

T = TypeVar("T")

STATUS = {"finished": "finished", "stopped": "stopped", "failed": "failed", "training": "no end recorded"}

_MAX_EVALUATIONS = 40
_MAX_SAMPLES = 8
_MAX_LABELS = 20
_MAX_LISTED = 200
_MAX_SCORES = 12
_MAX_SHOWN_CHARS = 4000
_decimal = or_unknown(measured)
_short = or_unknown(lambda value: rate(value) if value >= 1e6 else count(value))


def introduction(run: RecordedRun) -> str:
    model, optimizer = part(run.config, "model"), part(run.config, "optim")
    identity, environment = run.record.identity, run.record.environment
    weights = f"{run.num_weights / 1e6:,.2f}M weights" if run.num_weights else "no checkpoint yet"
    if run.record.trained_weights is not None:
        weights += f", of which {_short(run.record.trained_weights)} are trained"
    ranks = environment.world_size
    gpus = ", ".join(dict.fromkeys(environment.gpus))
    device = str(identity.get("device", "cpu"))
    device = (environment.processor or device) if device.startswith("cpu") else gpus or device
    reason = run.record.ended_by
    ending = f" It {STATUS.get(run.status, run.status)} at step {run.record.step}: {reason}" if reason else ""
    own_code = ", with an extension (extension.py)" if identity.get("extension") else ""
    return (
        f"A decoder of {model.get('layers')} layers, width {model.get('width')} ({weights}), trained with {optimizer.get('kind')} "
        f"in {run.config.get('precision')} by {ranks} rank{'s' * (ranks != 1)} on {device}{own_code}.{ending}"
    )


def headline(run: RecordedRun) -> list[tuple[str, str, str]]:
    best, mfu = run.best, run.curve("mfu").finite
    tokens, average = run.curve("targets").last, smoothed(run, "loss").last
    window = loss_window(run)
    last = run.curve("loss").last
    steps = number(part(run.config, "limits").get("steps"))
    return [
        ("status", STATUS.get(run.status, run.status), f"step {run.step:,}" + (f" of {steps:,.0f}" if steps else "")),
        ("training loss", _decimal(average), f"mean of {window} steps; last {_decimal(last)}" if window > 1 else "last step"),
        (
            "best validation loss",
            _decimal(best.val_loss if best else None),
            f"step {best.step:,}, {_about(run, best)}" if best else "no evaluation yet",
        ),
        ("tokens", _short(tokens), "trained on, repeats counted"),
        ("training time", duration(run.seconds) if tokens else UNKNOWN, "without evaluations and saves"),
        (
            "tokens a second",
            or_unknown(rate)(run.tokens_per_s),
            f"median; MFU {share(float(np.median(mfu)))}" if len(mfu) else "median; MFU unknown",
        ),
        ("alerts", count(len(run.alerts)), "listed below" if run.alerts else "no rule was broken"),
    ]


def _about(run: RecordedRun, best: EvalEvent) -> str:
    if run.has_perplexity:
        return f"perplexity {_decimal(best.perplexity)}"
    measured = next((event.words for event in run.of(MeasuresEvent) if event.step == best.step), "not measured")
    return f"nats per {run.target}; {measured}"


def alert_kinds(run: RecordedRun) -> str:
    kinds = Counter(event.rule for event in run.alerts if event.rule)
    return "; ".join(f"{rule}: {times:,}" for rule, times in kinds.most_common())


def evaluations(run: RecordedRun) -> list[EvalEvent]:
    return _spread(run.evaluations, _MAX_EVALUATIONS, run.best)


def groups_by(run: RecordedRun) -> list[tuple[str, list[tuple[str, Score, float]]]]:
    found = []
    for by, words in group_titles().items():
        scores: Mapping[str, Score] = getattr(run.evaluations[-1], by) if run.evaluations else {}
        total = sum(score.num_targets for score in scores.values()) or 1
        if scores:
            found.append((words, [(name, score, score.num_targets / total) for name, score in scores.items()]))
    return found


@dataclass(frozen=True)
class Samples:
    newest: Sequence[SampleEvent]
    older: Sequence[SampleEvent]


def samples(run: RecordedRun) -> Samples:
    found = [replace(event, text=shortened(event.text, _MAX_SHOWN_CHARS)) for event in reversed(run.of(SampleEvent))]
    newest = [event for event in found if event.step == found[0].step][:_MAX_SAMPLES]
    earlier = [event for event in found if event.step != found[0].step]
    return Samples(newest[::-1], _spread(earlier, _MAX_SAMPLES))


@dataclass(frozen=True)
class Table:
    columns: Sequence[str] = ()
    rows: Sequence[tuple[str, Sequence[float | None]]] = ()


def scores(run: RecordedRun) -> Table:
    found = [(event.step, event.numbers) for event in run.of(ScoresEvent)]
    chosen = _spread([(step, values) for step, values in found if values], _MAX_SCORES)
    names = dict.fromkeys(name for _, values in found for name in values)
    rows = [(name.replace("_", " "), [values.get(name) for _, values in chosen]) for name in names]
    return Table([f"step {step:,}" for step, _ in chosen], rows)


@dataclass(frozen=True)
class Labels:
    step: int
    steps: Table = Table()  # the measures without a `/` in their names, by step
    each: Table = Table()  # the measures of each label, at the newest step
    confusion: Table = Table()
    """Counts by true and predicted label, at the newest step; empty if there are too many labels for a table."""


def labels(run: RecordedRun) -> Labels:
    found = run.of(MeasuresEvent)
    if not found:
        return Labels(0)
    newest = found[-1]
    columns = [name for name in newest.values if "/" not in name]
    steps = [(f"{event.step:,}", [event.values.get(name) for name in columns]) for event in _spread(found, _MAX_EVALUATIONS)]
    kinds = list(dict.fromkeys(name.partition("/")[0] for name in newest.values if "/" in name))
    names = list(dict.fromkeys(name.partition("/")[2] for name in newest.values if "/" in name))
    each = [(name, [newest.values.get(f"{kind}/{name}") for kind in kinds]) for name in names]
    predicted = sorted({name for row in newest.confusion.values() for name in row} | newest.confusion.keys())
    table: list[tuple[str, Sequence[float | None]]] = [
        (true, [newest.confusion.get(true, {}).get(name, 0) for name in predicted]) for true in predicted
    ]
    return Labels(
        newest.step,
        Table([name.replace("_", " ") for name in columns], steps),
        Table(kinds, each[:_MAX_LISTED]),
        Table(predicted, table) if len(predicted) <= _MAX_LABELS else Table(),
    )


@dataclass(frozen=True)
class Speed:
    words: str
    rows: Sequence[tuple[str, Sequence[str]]]  # percentiles 5, 50 and 95 of each measure


def speed(run: RecordedRun) -> Speed:
    tokens_per_s, wait = run.curve("tokens_per_s").finite, run.curve("loader_wait_s").finite
    stalls = [stall for event in run.of(SaveEvent) if (stall := event.stall_s) is not None]
    measures: list[tuple[str, NDArray[np.float64], Callable[[float], str]]] = [
        ("tokens a second", tokens_per_s, rate),
        ("model FLOPs utilisation", run.curve("mfu").finite, share),
        ("seconds a step", run.curve("seconds").finite, measured),
        ("seconds a step waited for data", wait, measured),
    ]
    words = [f"{duration(run.seconds)} of training in {count(len(tokens_per_s))} steps"]
    if len(wait) and run.seconds:
        words.append(f"{share(float(wait.sum()) / run.seconds)} of it waiting for data")
    if stalls:
        words.append(f"{len(stalls):,} saves delayed it by {duration(sum(stalls))} in total, {duration(max(stalls))} at most")
    rows = [
        (name, [form(float(np.percentile(values, percent))) for percent in (5, 50, 95)])
        for name, values, form in measures
        if len(values) and len(tokens_per_s)
    ]
    return Speed("; ".join(words) + ".", rows)


@dataclass(frozen=True)
class Hardware:
    names: Sequence[str]
    charts: Sequence[Chart]
    constant: Sequence[tuple[str, float]]


def hardware(run: RecordedRun) -> Hardware:
    found = hardware_curves(run)
    same = [
        (f"{place}: {name.replace('_', ' ')}", float(curve.y_N[-1]))
        for (_, name), each in found.items()
        for place, curve in each.items()
        if len(np.unique(curve.y_N)) == 1
    ]
    names = dict.fromkeys(str(gpu["name"]) for event in run.of(HardwareEvent) for gpu in event.gpus if gpu.get("name"))
    return Hardware(list(names), hardware_charts(found), same)


def _spread(values: Sequence[T], most: int, wanted: T | None = None) -> list[T]:
    """Return at most `most` values, evenly spread, and `wanted`. The first and the last are among them."""
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int).tolist()
    return [value for place, value in enumerate(values) if place in places or value is wanted]
