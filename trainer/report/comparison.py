"""The page that compares runs: their results, their curves in common charts, and their differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.html.chart import WIDE, Chart, Line
from common.html.curves import Curve, median
from common.html.page import UNKNOWN, render_page
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


@dataclass(frozen=True)
class _Compared:
    name: str
    run: RecordedRun

    @property
    def training_loss(self) -> float | None:
        return smoothed(self.run, "loss").last

    @property
    def mfu(self) -> float | None:
        return median(self.run.curve("mfu").y_N)

    @property
    def data(self) -> str:
        return self.run.record.data.root_digest

    @property
    def tokenizer(self) -> str:
        return self.run.record.data.tokenizer_digest or UNKNOWN

    @property
    def val_targets(self) -> int | None:
        return self.run.evaluations[-1].targets if self.run.evaluations else None


def render_comparison(runs: Sequence[RecordedRun]) -> str:
    """Return the page. The order of the runs decides their colours. Raises ConfigError if a run is named twice."""
    compared = [_Compared(name, run) for name, run in zip(names_of([run.path for run in runs]), runs, strict=True)]
    evaluated = [one for one in compared if one.val_targets is not None]
    groups: dict[tuple[str, int | None], list[str]] = {}
    for one in evaluated:
        groups.setdefault((one.data, one.val_targets), []).append(one.name)
    same = "; ".join(" and ".join((", ".join(names[:-1]), names[-1])) for names in groups.values() if len(names) > 1)
    losses = {one.name: one.run.best.val_loss for one in compared if one.run.best}
    settings = [compared_settings(run.config, run.record.identity) for run in runs]
    return render_page(
        TEMPLATES,
        "comparison.jinja",
        script=True,
        title=f"{len(runs)} runs",
        introduction=", ".join(one.name for one in compared),
        compared=compared,
        has_perplexity=any(run.has_perplexity for run in runs),
        has_bits=any(event.bits_per_byte is not None for run in runs for event in run.evaluations),
        lowest=[name for name, loss in losses.items() if loss == min(losses.values())] if len(groups) == 1 else [],
        num_data=len({one.data for one in compared}),
        num_tokenizers=len({one.tokenizer for one in compared}),
        comparable=f" Losses can be compared within: {same}." if same else "",
        other_targets=len(groups) > len({data for data, _ in groups}),
        charts=_curves({one.name: one.run for one in compared}),
        settings=differing(settings),
        surroundings=differing(_surroundings(runs, {name for one in settings for name in one})),
    )


def _curves(named: Mapping[str, RecordedRun]) -> list[Chart]:
    def lines(curve: Callable[[RecordedRun], Curve], *, points: bool = False) -> tuple[Line, ...]:
        return tuple(Line(name, curve(run), look=look, points=points) for look, (name, run) in enumerate(named.items()))

    nats, validation = "nats per token", lines(lambda run: run.validation("val_loss"), points=True)
    by_tokens = lines(lambda run: _over_tokens(run, run.validation("val_loss")), points=True)
    training = lines(lambda run: smoothed(run, "loss"))
    charts = [
        Chart("Validation loss", nats, validation, log_from=WIDE),
        Chart("Training loss, mean of the last log.average_steps steps", nats, training, log_from=WIDE),
        Chart("Validation loss by tokens", nats, by_tokens, along="tokens trained on", log_from=WIDE),
        Chart("Bits per byte", "bits", lines(lambda run: run.validation("bits_per_byte"), points=True), log_from=WIDE),
    ]
    for name, metric in metrics_of(TrainEvent).items():
        if (plot := metric.plot) is not None:
            found = {run: smoothed(one, name) if plot.averaged else one.curve(name) for run, one in named.items()}
            shown = tuple(Line(run, scaled(plot, curve), look=look) for look, (run, curve) in enumerate(found.items()))
            charts.append(chart_of(replace(plot, title=plot.title + ", moving average" * plot.averaged), shown))
    return charts


def _over_tokens(run: RecordedRun, curve: Curve) -> Curve:
    tokens = run.curve("targets")
    reached = dict(zip(tokens.x_N.tolist(), tokens.y_N.tolist(), strict=True)) | {0.0: 0.0}
    return Curve.of((reached[x], y) for x, y in zip(curve.x_N.tolist(), curve.y_N.tolist(), strict=True) if x in reached)


def _surroundings(runs: Sequence[RecordedRun], settings: Collection[str]) -> list[dict[str, Any]]:
    # a fact that an older version did not record has the value of the others
    found = []
    for run in runs:
        environment, identity = run.record.environment.to_json(), run.record.identity
        packages = {f"package {name}": version for name, version in part(environment, "packages").items()}
        named = {name: environment[name] for name in _ENVIRONMENT if name in environment}
        found.append(
            {name: value for name, value in identity.items() if name not in settings and name != "data"} | named | packages
        )
    known = {name: value for one in reversed(found) for name, value in one.items() if not name.startswith("package ")}
    return [known | one for one in found]
