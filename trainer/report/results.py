"""The sections about what came out of a run: headline, curves, alerts, evaluation, samples, speed, hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from common.html.chart import Chart
from common.html.chart import measured as decimal
from common.html.curves import average_window
from common.html.line_chart import draw
from common.text import duration
from trainer.model.loss import perplexity
from trainer.report.charts import (
    GROUPS,
    average_loss,
    group_charts,
    hardware_charts,
    hardware_curves,
    layer_charts,
    main_charts,
    speed_charts,
)
from trainer.report.parts import NOTHING, UNKNOWN, Html, element, folded, join, note, table
from trainer.report.recorded_run import Event, RecordedRun, groups_of, number, part, tables
from trainer.report.wording import count, rate, share

__all__ = ["STATUS", "alerts", "curves", "evaluation", "hardware", "introduction", "samples", "throughput", "tiles"]

T = TypeVar("T")

STATUS = {"finished": "finished", "stopped": "stopped", "failed": "failed", "training": "no end recorded"}
"""How a run's status is said in two words."""

_MAX_ALERTS = 200
_MAX_EVALUATIONS = 40
_MAX_SAMPLES = 8
_MAX_SCORES = 12
_MAX_SHOWN_CHARS = 4000


def introduction(run: RecordedRun) -> str:
    """What was trained, and on what, in a sentence."""
    model, optimizer = part(run.config, "model"), part(run.config, "optim")
    identity, environment = part(run.record, "identity"), part(run.record, "environment")
    weights = f"{run.num_weights / 1e6:,.2f}M weights" if run.num_weights else "no checkpoint yet"
    ranks = int(environment.get("world_size", 1))
    gpus = ", ".join(dict.fromkeys(map(str, environment.get("gpus") or ())))
    device = str(identity.get("device", "cpu"))
    device = (environment.get("processor") or device) if device.startswith("cpu") else gpus or device
    own_code = ", with code of its own (extension.py)" if identity.get("extension") else ""
    return (
        f"A decoder of {model.get('layers')} layers, width {model.get('width')} ({weights}), trained with {optimizer.get('kind')} "
        f"in {run.config.get('precision')} by {ranks} rank{'s' * (ranks != 1)} on {device}{own_code}.{_ending(run)}"
    )


def _ending(run: RecordedRun) -> str:
    """How and why the run ended, where the record says so."""
    reason = run.record.get("ended_by")
    return f" It {STATUS.get(run.status, run.status)} at step {run.record.get('step')}: {reason}" if reason else ""


def tiles(run: RecordedRun) -> Html:
    """The numbers that are looked at first."""
    best, mfu = run.best, run.curve("mfu")
    tokens, average = run.curve("tokens").last, average_loss(run).last
    window = average_window(len(run.curve("loss")))
    last = run.curve("loss").last
    shown = {
        "status": (STATUS.get(run.status, run.status), f"step {run.step:,}{_of_planned(run)}"),
        "training loss": (_decimal(average), f"mean of {window} steps; last {_decimal(last)}" if window > 1 else "last step"),
        "best validation loss": (
            _decimal(number(best["val_loss"]) if best else None),
            f"step {best['step']:,}, perplexity {_decimal(number(best.get('perplexity')))}" if best else "no evaluation yet",
        ),
        "tokens": (_short(tokens), "trained on, repeats counted"),
        "training time": (duration(run.seconds) if tokens else UNKNOWN, "without evaluations and saves"),
        "tokens a second": (
            rate(run.tokens_per_s) if run.tokens_per_s is not None else UNKNOWN,
            f"median; MFU {share(float(np.median(mfu.finite)))}" if len(mfu.finite) else "median; MFU not known",
        ),
        "alerts": (count(len(run.of("alert"))), "below, each with its step" if run.of("alert") else "nothing was found"),
    }
    return element(
        "div",
        *(
            element("div", element("span", name), element("b", value), element("small", remark), class_="tile")
            for name, (value, remark) in shown.items()
        ),
        class_="tiles",
    )


def curves(run: RecordedRun) -> Html:
    """The main curves, the speed, and where they were measured those by group and layer."""
    charts = [*main_charts(run), *speed_charts(run), *group_charts(run), *layer_charts(run)]
    drawn = _drawn(charts)
    return drawn or note("No step has been made yet.")


def alerts(run: RecordedRun) -> Html:
    """What the guard and the other rules found, in order."""
    found = run.of("alert")
    if not found:
        return note("None.")
    kinds = Counter(str(event["rule"]) for event in found if event.get("rule"))
    told = note("; ".join(f"{rule}: {times:,}" for rule, times in kinds.most_common())) if kinds else NOTHING
    rows = (
        (
            *(event.get(name) or UNKNOWN for name in ("rule", "severity", "action")),
            str(event.get("message", "")),
            count(number(event.get("step")) or 0),
            *(_decimal(number(event.get(name))) for name in ("value", "threshold")),
        )
        for event in found[:_MAX_ALERTS]
    )
    columns = ("rule", "severity", "action", "what was found", "step", "value", "threshold")
    return join((told, table(columns, rows, num_names=4), _others(len(found) - _MAX_ALERTS, "alerts")))


def evaluation(run: RecordedRun) -> Html:
    """The validations, and the newest one's loss by source, kind and length where that was measured."""
    found = run.of("eval")
    if not found:
        return note("No evaluation yet.")
    chosen = _spread(found, _MAX_EVALUATIONS, run.best)
    bits = any("bits_per_byte" in event for event in found)
    columns = ("step", "validation loss", "perplexity", *(("bits per byte",) if bits else ()), "targets")
    rows = [
        (
            count(event["step"]) + (" (best)" if event is run.best else ""),
            *(_decimal(number(event.get(name))) for name in ("val_loss", "perplexity", *(("bits_per_byte",) if bits else ()))),
            _count(number(event.get("targets"))),
        )
        for event in chosen
    ]
    marked = frozenset(place for place, event in enumerate(chosen) if event is run.best)
    left_out = len(found) - len(chosen)
    cut = note(f"{left_out:,} evaluations between these are in metrics.jsonl.") if left_out else NOTHING
    return join((table(columns, rows, marked=marked), cut, *(_group_table(found[-1], key, words) for key, words in GROUPS.items())))


def samples(run: RecordedRun) -> Html:
    """What the model wrote, newest first, and the scores of it."""
    found = list(reversed(run.of("sample")))
    if not found:
        return NOTHING
    newest = [event for event in found if event["step"] == found[0]["step"]][:_MAX_SAMPLES]
    earlier = [event for event in found if event["step"] != found[0]["step"]]
    older = _spread(earlier, _MAX_SAMPLES)
    parts = [_sample(event) for event in reversed(newest)]
    if older:
        parts.append(folded(f"{len(older)} earlier samples", *(_sample(event) for event in older)))
    return join((*parts, _scores(run)))


def throughput(run: RecordedRun) -> Html:
    """How fast the steps were, and what they waited for."""
    speed = run.curve("tokens_per_s").finite
    if not len(speed):
        return NOTHING
    wait, seconds = run.curve("loader_wait_s").finite, run.seconds
    stalls = [stall for event in run.of("save") if (stall := number(event.get("stall_s"))) is not None]
    rows = [("tokens a second", *(rate(float(np.percentile(speed, part))) for part in (5, 50, 95)))]
    mfu = run.curve("mfu").finite
    if len(mfu):
        rows.append(("model FLOPs utilisation", *(share(float(np.percentile(mfu, part))) for part in (5, 50, 95))))
    per_step = run.step_seconds.finite
    if len(per_step):
        rows.append(("seconds a step", *(decimal(float(np.percentile(per_step, part))) for part in (5, 50, 95))))
    if len(wait):
        rows.append(("seconds a step waited for data", *(decimal(float(np.percentile(wait, part))) for part in (5, 50, 95))))
    told = [f"{duration(seconds)} of training in {count(len(speed))} steps"]
    if len(wait) and seconds:
        told.append(f"{share(float(wait.sum()) / seconds)} of it waiting for data")
    if stalls:
        told.append(f"{len(stalls):,} saves held it up for {duration(sum(stalls))} in all, {duration(max(stalls))} at most")
    return join((note("; ".join(told) + "."), table(("", "5 % are below", "median", "5 % are above"), rows)))


def hardware(run: RecordedRun) -> Html:
    """What was sampled of GPUs and host."""
    found = hardware_curves(run)
    same = [
        (f"{place}: {name.replace('_', ' ')}", decimal(float(curve.y_N[-1])))
        for name, each in found.items()
        for place, curve in each.items()
        if len(np.unique(curve.y_N)) == 1
    ]
    names = dict.fromkeys(str(gpu["name"]) for event in run.of("hardware") for gpu in tables(event, "gpus") if gpu.get("name"))
    told = note(", ".join(names)) if names else NOTHING
    constant = folded("what did not change", table(("", "value"), same)) if same else NOTHING
    return join((told, _drawn(hardware_charts(found)), constant))


def _drawn(charts: Sequence[Chart]) -> Html:
    pictures = [picture for chart in charts if (picture := draw(chart))]
    return element("div", *pictures, class_="pair") if pictures else NOTHING


def _group_table(event: Event, key: str, words: str) -> Html:
    groups = groups_of(event, key)
    if not groups:
        return NOTHING
    total = sum(number(group.get("targets")) or 0 for group in groups) or 1
    bits = any(group.get("bits_per_byte") is not None for group in groups)
    rows = (
        (
            str(group.get("name")),
            _decimal(loss := number(group.get("loss"))),
            _decimal(_exp(loss)),
            *((_decimal(number(group.get("bits_per_byte"))),) if bits else ()),
            _count(targets := number(group.get("targets"))),
            share((targets or 0) / total),
        )
        for group in groups
    )
    columns = (words, "validation loss", "perplexity", *(("bits per byte",) if bits else ()), "targets", "share")
    return table(columns, rows, title=f"By {words}, at step {event['step']:,}")


def _sample(event: Event) -> Html:
    prompt, written = str(event.get("prompt") or ""), str(event.get("text") or "")
    told = f"step {event['step']:,}" + (f", {event['finish_reason']}" if event.get("finish_reason") else "")
    if prompt and written.startswith(prompt):
        content = join((element("b", prompt), _cut(written[len(prompt) :])))
    else:
        content = join((element("b", prompt), _cut(written)))
    return element("figure", element("figcaption", told), element("pre", content, dir="auto"))


def _cut(written: str) -> str:
    return written if len(written) <= _MAX_SHOWN_CHARS else f"{written[:_MAX_SHOWN_CHARS]}…"


def _scores(run: RecordedRun) -> Html:
    """Of the samples, from events of their own or from the samples' own events."""
    found = [(event, dict(_numbers(event))) for event in run.of("scores")]
    found += [(event, dict(_numbers(event["scores"]))) for event in run.of("sample") if isinstance(event.get("scores"), Mapping)]
    found = [(event, scores) for event, scores in found if scores]
    if not found:
        return NOTHING
    names = list(dict.fromkeys(name for _, scores in found for name in scores))
    chosen = _spread(found, _MAX_SCORES)
    columns = ("score", *(f"step {event['step']:,}" for event, _ in chosen))
    rows = ((name.replace("_", " "), *(_decimal(scores.get(name)) for _, scores in chosen)) for name in names)
    return table(columns, rows, title="Scores of the samples")


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [
        (name, known) for name, value in values.items() if name not in ("step", "event") and (known := number(value)) is not None
    ]


def _spread(values: Sequence[T], most: int, wanted: T | None = None) -> list[T]:
    """At most so many of them, evenly spread, with the first, the last and the one that is wanted."""
    if len(values) <= most:
        return list(values)
    places = np.linspace(0, len(values) - 1, most).round().astype(int).tolist()
    return [value for place, value in enumerate(values) if place in places or value is wanted]


def _others(more: int, what: str) -> Html:
    return note(f"and {more:,} more {what}, in metrics.jsonl") if more > 0 else NOTHING


def _of_planned(run: RecordedRun) -> str:
    steps = number(part(run.config, "limits").get("steps"))
    return f" of {steps:,.0f}" if steps else ""


def _decimal(value: float | None) -> str:
    return UNKNOWN if value is None else decimal(value)


def _count(value: float | None) -> str:
    return UNKNOWN if value is None else count(value)


def _short(value: float | None) -> str:
    return UNKNOWN if value is None else rate(value) if value >= 1e6 else count(value)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else perplexity(loss)
