"""The charts of one run as values, from the `Plot` of each metric. The page and the picture draw the same charts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.html.chart import WIDE, Chart, Curve, Line, average_window, moving_average
from common.untrusted import number
from trainer.config import TrainConfig
from trainer.report.recorded_run import RecordedRun, part
from trainer.runs.events import EvalEvent, HardwareEvent, LayersEvent, TrainEvent
from trainer.runs.metric import Plot, metrics_of, title_of

_MAX_GROUPS = 7
_MAX_GPUS = 8  # GPUs in a chart, at most. More lines cannot be distinguished.


def main_charts(run: RecordedRun) -> list[Chart]:
    loss, average = run.curve("loss"), smoothed(run, "loss")
    window = loss_window(run)
    smooth = f"training, mean of {window} steps" if window > 1 else "training"
    each_step = (Line("training, each step", loss, look=6, faint=True),) if window > 1 else ()
    validation = Line("validation", run.validation("val_loss"), look=1, points=True)
    charts = [Chart("Loss", f"nats per {run.target}", (*each_step, Line(smooth, average), validation), log_from=WIDE)]
    perplexities = [Line("validation", run.validation("perplexity"), look=1, points=True)] if run.has_perplexity else []
    if run.record.identity.get("objective", "language") == "language":
        with np.errstate(over="ignore"):
            perplexities.insert(0, Line(smooth, Curve(average.x_N, np.exp(average.y_N))))
    if perplexities:
        charts.append(Chart("Perplexity", "exp(loss)", tuple(perplexities), log_from=WIDE))
    return charts + _step_charts(run, main=True)


def all_charts(run: RecordedRun) -> list[Chart]:
    charts, groups = main_charts(run) + _step_charts(run, main=False), group_titles()
    for name, metric in metrics_of(EvalEvent).items():
        if name in groups:
            points: dict[str, list[tuple[float, float]]] = {}
            for event in run.evaluations:
                for group, score in getattr(event, name).items():
                    points.setdefault(group, []).append((event.step, score.loss))
            if 1 < len(points) <= _MAX_GROUPS:
                lines = tuple(Line(group, Curve.of(some), look, points=True) for look, (group, some) in enumerate(points.items()))
                charts.append(Chart(f"Validation loss by {groups[name]}", f"nats per {run.target}", lines, log_from=WIDE))
        elif metric.plot is not None and len(curve := run.validation(name)):
            charts.append(chart_of(metric.plot, (Line(_name(metric.plot), scaled(metric.plot, curve), look=1, points=True),)))
    return charts + layer_charts(run)


def _step_charts(run: RecordedRun, *, main: bool) -> list[Chart]:
    charts = []
    for name, metric in metrics_of(TrainEvent).items():
        if (plot := metric.plot) is not None and plot.main == main and len(run.curve(name)):
            curve = scaled(plot, run.curve(name))
            lines: tuple[Line, ...] = (Line(_name(plot), curve),)
            if plot.averaged and (window := average_window(len(curve))) > 1:
                each_step = Line("each step", curve, look=6, faint=True)
                lines = (each_step, Line(f"mean of {window} steps", moving_average(curve, window)))
            charts.append(chart_of(plot, lines))
    return charts


def smoothed(run: RecordedRun, name: str) -> Curve:
    """Return the moving average of a metric of the training steps; that of the loss is the `loss_average` of the metrics."""
    curve = run.curve(name)
    return moving_average(curve, loss_window(run) if name == "loss" else average_window(len(curve)))


def loss_window(run: RecordedRun) -> int:
    """Return the number of steps in the mean that is called the training loss: `log.average_steps`, or all if there are fewer."""
    wanted = number(part(run.config, "log").get("average_steps")) or TrainConfig.model_fields["log"].default.average_steps
    return max(1, min(len(run.curve("loss")), round(wanted)))


def group_titles() -> dict[str, str]:
    return {name: metric.plot.title for name, metric in metrics_of(EvalEvent).items() if metric.plot and "{}" in metric.curve}


def layer_charts(run: RecordedRun) -> list[Chart]:
    charts = []
    for key, metric in metrics_of(LayersEvent).items():
        if metric.plot is not None:
            layers = [(event.step, list(getattr(event, key).values())) for event in run.of(LayersEvent)]
            lines = tuple(
                Line(
                    name,
                    Curve.of((step, float(np.quantile(values, share, method="nearest"))) for step, values in layers if values),
                    look=look,
                )
                for look, (name, share) in enumerate({"highest": 1.0, "median": 0.5, "lowest": 0.0}.items())
            )
            charts.append(chart_of(metric.plot, lines))
    return charts


def hardware_curves(run: RecordedRun) -> dict[tuple[str, str], dict[str, Curve]]:
    points: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for event in run.of(HardwareEvent):
        for curve, value in event.points().items():
            device, _, name = curve.partition("/")
            kind, _, index = device.partition("_")
            found = points.setdefault((kind, name), {})
            found.setdefault(f"GPU {index}" if index else kind, []).append((float(event.step), value))
    return {name: {device: Curve.of(some) for device, some in each.items()} for name, each in points.items()}


def hardware_charts(curves: Mapping[tuple[str, str], Mapping[str, Curve]]) -> list[Chart]:
    charts = []
    for (kind, name), each in curves.items():
        if any(len(np.unique(curve.y_N)) > 1 for curve in each.values()):
            title, unit = title_of(name)
            lines = tuple(Line(device, curve, look=look) for look, (device, curve) in enumerate(list(each.items())[:_MAX_GPUS]))
            charts.append(Chart(f"{'Host' if kind == 'host' else 'GPU'}: {title}", unit, lines, from_zero=True))
    return charts


def chart_of(plot: Plot, lines: tuple[Line, ...]) -> Chart:
    from_zero = plot.from_zero or plot.unit.startswith("%")
    return Chart(plot.title, plot.unit, lines, from_zero=from_zero, log_from=None if from_zero else WIDE)


def scaled(plot: Plot, curve: Curve) -> Curve:
    return Curve(curve.x_N, 100 * curve.y_N) if plot.unit.startswith("%") else curve


def _name(plot: Plot) -> str:
    return plot.title[:1].lower() + plot.title[1:]
