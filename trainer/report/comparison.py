"""The page that compares runs: their results, their curves in common charts, and their differences."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.html.chart import WIDE, Chart, Curve, Line
from common.html.page import render_page
from trainer.report.charts import chart_of, scaled, smoothed
from trainer.report.differences import compared_settings, differing
from trainer.report.recorded_run import RecordedRun, part
from trainer.report.run_page import TEMPLATES
from trainer.runs.events import TrainEvent
from trainer.runs.metric import metrics_of

_ENVIRONMENT = ("code", "image", "python", "torch", "cuda", "processor", "gpus", "world_size")


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of each path, as many as distinguish it from the other runs. Raises ConfigError if two are equal."""
    parts = [path.resolve().parts for path in paths]
    for place, one in enumerate(parts):
        if one in parts[:place]:
            raise ConfigError(f"compare: {paths[place]} is named twice; name each run once")
    names = []
    for one in parts:
        rivals = [other for other in parts if other != one]
        depth = next((depth for depth in range(1, len(one)) if all(other[-depth:] != one[-depth:] for other in rivals)), len(one))
        names.append(Path(*one[-depth:]).as_posix())
    return names


def render_comparison(runs: Sequence[RecordedRun]) -> str:
    """Return the page. The order of the runs decides their colours. Raises ConfigError if a run is named twice."""
    named = dict(zip(names_of([run.path for run in runs]), runs, strict=True))
    data = [run.record.data for run in runs]
    groups: dict[tuple[str, int], list[str]] = {}
    for name, run in named.items():
        if run.evaluations:
            groups.setdefault((run.record.data.root_digest, run.evaluations[-1].targets), []).append(name)
    same = "; ".join(" and ".join((", ".join(names[:-1]), names[-1])) for names in groups.values() if len(names) > 1)
    losses = {name: run.best.val_loss for name, run in named.items() if run.best}
    settings = [compared_settings(run.config, run.record.identity) for run in runs]
    return render_page(
        TEMPLATES,
        "comparison.jinja",
        script=True,
        title=f"{len(runs)} runs",
        introduction=", ".join(named),
        named=named,
        smoothed=smoothed,
        has_perplexity=any(run.has_perplexity for run in runs),
        has_bits=any(event.bits_per_byte is not None for run in runs for event in run.evaluations),
        lowest=[name for name, loss in losses.items() if loss == min(losses.values())] if len(groups) == 1 else [],
        num_data=len({one.root_digest for one in data}),
        num_tokenizers=len({one.tokenizer_digest for one in data}),
        comparable=f" Losses can be compared within: {same}." if same else "",
        other_targets=len(groups) > len({root for root, _ in groups}),
        charts=_curves(named),
        settings=differing(settings),
        surroundings=differing(_surroundings(runs, {name for one in settings for name in one})),
    )


def _curves(named: Mapping[str, RecordedRun]) -> list[Chart]:
    runs = list(named.values())

    def lines(curves: Iterable[Curve], *, points: bool = False) -> tuple[Line, ...]:
        return tuple(Line(name, curve, look, points=points) for look, (name, curve) in enumerate(zip(named, curves, strict=True)))

    def by_tokens(run: RecordedRun) -> Curve:
        tokens, losses = run.curve("targets"), run.validation("val_loss")
        reached = dict(zip(tokens.x_N.tolist(), tokens.y_N.tolist(), strict=True)) | {0.0: 0.0}
        return Curve.of((reached[x], y) for x, y in zip(losses.x_N.tolist(), losses.y_N.tolist(), strict=True) if x in reached)

    nats, training = "nats per token", lines(smoothed(run, "loss") for run in runs)
    validation = lines((run.validation("val_loss") for run in runs), points=True)
    bits = lines((run.validation("bits_per_byte") for run in runs), points=True)
    over_tokens = lines(map(by_tokens, runs), points=True)
    charts = [
        Chart("Validation loss", nats, validation, log_from=WIDE),
        Chart("Training loss, mean of the last log.average_steps steps", nats, training, log_from=WIDE),
        Chart("Validation loss by tokens", nats, over_tokens, along="tokens trained on", log_from=WIDE),
        Chart("Bits per byte", "bits", bits, log_from=WIDE),
    ]
    for name, metric in metrics_of(TrainEvent).items():
        if (plot := metric.plot) is not None:
            shown = lines(scaled(plot, smoothed(run, name) if plot.averaged else run.curve(name)) for run in runs)
            charts.append(chart_of(replace(plot, title=plot.title + ", moving average" * plot.averaged), shown))
    return charts


def _surroundings(runs: Sequence[RecordedRun], settings: Collection[str]) -> list[dict[str, Any]]:
    # a fact that an older version did not record has the value of the others
    found = []
    for run in runs:
        environment, identity = run.record.environment.to_json(), run.record.identity
        facts = {name: value for name, value in identity.items() if name not in settings and name != "data"}
        facts |= {name: environment[name] for name in _ENVIRONMENT if name in environment}
        found.append(facts | {f"package {name}": version for name, version in part(environment, "packages").items()})
    known = {name: value for one in reversed(found) for name, value in one.items() if not name.startswith("package ")}
    return [known | one for one in found]
