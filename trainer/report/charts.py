"""The charts of one run as values. The page and the picture draw the same charts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.html.chart import WIDE, Chart, Line
from common.html.curves import Curve, average_window, moving_average
from common.untrusted import number
from trainer.config import TrainConfig
from trainer.report.recorded_run import RecordedRun, part
from trainer.runs.events import HardwareEvent, LayersEvent

__all__ = [
    "GROUPS",
    "convergence_charts",
    "group_charts",
    "hardware_charts",
    "hardware_curves",
    "layer_charts",
    "loss_window",
    "main_charts",
    "smoothed",
    "speed_charts",
]

GROUPS = {"source": "source", "kind": "kind of text", "length": "length of the document"}
"""The groups of an evaluation: the property that divides the text, and the words for people."""
_MAX_GROUPS = 7

_UNITS = {
    "_mb_per_1000_steps": "MB per 1,000 steps",
    "_mb_per_s": "MB per second",
    "_mib": "MiB",
    "_gb": "GB",
    "_c": "°C",
    "_w": "W",
    "_mhz": "MHz",
    "": "share, or count",
}
"""Units by the suffix of the metric's name."""
_MAX_GPUS = 8
"""GPUs in a chart, at most. More lines cannot be distinguished."""


def main_charts(run: RecordedRun) -> list[Chart]:
    """Return the charts of loss, perplexity if it has a meaning, learning rate and gradient norm."""
    loss, average = run.curve("loss"), smoothed(run, "loss")
    window = loss_window(run)
    validation, perplexity = run.validation("val_loss"), run.validation("perplexity")
    smooth = f"training, mean of {window} steps" if window > 1 else "training"
    step_by_step = Line("training, each step", loss, look=6, faint=True)
    perplexities = [Line("validation", perplexity, look=1, points=True)] if run.has_perplexity else []
    if run.objective == "language":
        with np.errstate(over="ignore"):
            perplexities.insert(0, Line(smooth, Curve(average.x_N, np.exp(average.y_N))))
    return [
        Chart(
            "Loss",
            f"nats per {run.target}",
            (*((step_by_step,) if window > 1 else ()), Line(smooth, average), Line("validation", validation, look=1, points=True)),
            log_from=WIDE,
        ),
        *([Chart("Perplexity", "exp(loss)", tuple(perplexities), log_from=WIDE)] if perplexities else []),
        Chart("Learning rate", "rate", (Line("learning rate", run.curve("learning_rate")),), from_zero=True),
        Chart("Gradient norm", "before clipping", _with_average("gradient norm", run.curve("grad_norm")), log_from=WIDE),
    ]


def speed_charts(run: RecordedRun) -> list[Chart]:
    """Return the charts of throughput, loader wait and, if it is known, model FLOPs utilisation."""
    wait, seconds = run.curve("loader_wait_s"), run.curve("seconds")
    waited = Curve.of(())
    if len(wait) == len(seconds):
        parts_N = np.divide(wait.y_N, seconds.y_N, out=np.full(len(wait), np.nan), where=seconds.y_N > 0)
        waited = Curve(wait.x_N, 100 * parts_N)
    mfu = run.curve("mfu")
    charts = [
        Chart("Throughput", "tokens per second", _with_average("tokens per second", run.curve("tokens_per_s")), from_zero=True),
        Chart("Loader wait", "% of the step", _with_average("waiting for data", waited), from_zero=True),
    ]
    if len(mfu):
        of_peak = Curve(mfu.x_N, 100 * mfu.y_N)
        charts.append(Chart("Model FLOPs utilisation", "% of the peak", _with_average("MFU", of_peak), from_zero=True))
    return charts


def smoothed(run: RecordedRun, name: str) -> Curve:
    """Return the moving average of a metric of the training steps; that of the loss is the `loss_average` of the metrics."""
    curve = run.curve(name)
    return moving_average(curve, loss_window(run) if name == "loss" else average_window(len(curve)))


def loss_window(run: RecordedRun) -> int:
    """Return the number of steps in the mean that is called the training loss: `log.average_steps`, or all if there are fewer."""
    wanted = number(part(run.config, "log").get("average_steps")) or TrainConfig.model_fields["log"].default.average_steps
    return max(1, min(len(run.curve("loss")), round(wanted)))


def convergence_charts(run: RecordedRun) -> list[Chart]:
    """Return the charts of the gap between validation and training loss and of the validation trend, if they were recorded."""
    titles = {
        "gap": ("Gap of the validation loss", "nats above the training loss"),
        "trend": ("Trend of the validation loss", "nats per 1,000 steps"),
    }
    curves = {name: run.validation(name) for name in ("gap", "trend")}
    return [
        Chart(*titles[name], (Line(name, curve, look=1, points=True),), from_zero=True)
        for name, curve in curves.items()
        if len(curve)
    ]


def group_charts(run: RecordedRun) -> list[Chart]:
    """Return the charts of bits per byte and of the validation loss by source, kind and length, if they were measured."""
    charts = []
    bits = run.validation("bits_per_byte")
    if len(bits):
        charts.append(Chart("Bits per byte", "bits", (Line("validation", bits, look=1, points=True),), log_from=WIDE))
    for by, words in GROUPS.items():
        curves = _by_group(run, by)
        if 1 < len(curves) <= _MAX_GROUPS:
            lines = tuple(Line(name, curve, look=look, points=True) for look, (name, curve) in enumerate(curves.items()))
            charts.append(Chart(f"Validation loss by {words}", f"nats per {run.target}", lines, log_from=WIDE))
    return charts


def layer_charts(run: RecordedRun) -> list[Chart]:
    """Return a chart for each metric of the layers, with the lowest, the median and the highest layer."""
    titles = {
        "gradient_norm": ("Gradient norm of the layers", "before clipping"),
        "update_ratio": ("Update-to-weight ratio of the layers", "norm of update / norm of weight"),
        "weight_norm": ("Weight norm of the layers", "norm"),
    }
    charts = []
    for key, (title, unit) in titles.items():
        layers = [(event.step, list(getattr(event, key).values())) for event in run.of(LayersEvent)]
        lines = tuple(
            Line(
                name,
                Curve.of((step, float(np.quantile(values, share, method="nearest"))) for step, values in layers if values),
                look=look,
            )
            for look, (name, share) in enumerate({"highest": 1.0, "median": 0.5, "lowest": 0.0}.items())
        )
        charts.append(Chart(title, unit, lines, log_from=WIDE))
    return charts


def hardware_curves(run: RecordedRun) -> dict[str, dict[str, Curve]]:
    """Return the curve of every sampled number, by its name and its place: the host or a GPU."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in run.of(HardwareEvent):
        places = [(f"GPU {gpu.get('index', 0)}", gpu) for gpu in event.gpus]
        growth = {"host_memory_mb_per_1000_steps": event.host_memory_mb_per_1000_steps}
        for place, values in [*places, ("host", {**event.host, **growth})]:
            for name, value in values.items():
                if name != "index" and not isinstance(value, str) and (known := number(value)) is not None:
                    points.setdefault(name, {}).setdefault(place, []).append((float(event.step), known))
    return {name: {place: Curve.of(some) for place, some in each.items()} for name, each in points.items()}


def hardware_charts(curves: Mapping[str, Mapping[str, Curve]]) -> list[Chart]:
    """Return a chart for each number that changed, with a line for each GPU."""
    charts = []
    for name, each in curves.items():
        if any(len(np.unique(curve.y_N)) > 1 for curve in each.values()):
            ending = next(ending for ending in _UNITS if name.endswith(ending))
            kind = "Host" if "host" in each else "GPU"
            title = f"{kind}: {name.removesuffix(ending).removeprefix('host_').replace('_', ' ')}"
            shown = list(each.items())[:_MAX_GPUS]
            lines = tuple(Line(place, curve, look=look) for look, (place, curve) in enumerate(shown))
            charts.append(Chart(title, _UNITS[ending], lines, from_zero=True))
    return charts


def _with_average(name: str, curve: Curve) -> tuple[Line, ...]:
    """Return the lines of a curve and its moving average, or of the curve alone if it is too short for an average."""
    window = average_window(len(curve))
    if window == 1:
        return (Line(name, curve),)
    return (Line("each step", curve, look=6, faint=True), Line(f"mean of {window} steps", moving_average(curve, window)))


def _by_group(run: RecordedRun, by: str) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float]]] = {}
    for event in run.evaluations:
        for name, score in event.groups[by].items():
            points.setdefault(name, []).append((float(event.step), score.loss))
    return {name: Curve.of(some) for name, some in points.items()}
