"""The events of a run as points of named curves. TensorBoard, Weights & Biases and MLflow show the same names."""

from __future__ import annotations

from typing import Any

from trainer.health.alerts import Alert
from trainer.metrics.step_metrics import StepMetrics, encodable
from trainer.runs.events import EvalEvent, Event, HardwareEvent, LayersEvent, MeasuresEvent, SaveEvent, ScalarsEvent, ScoresEvent

__all__ = ["EXTENSION_EVALUATION", "FINAL_METRICS", "MEASURES", "Points", "points_of"]

Points = dict[str, float]

FINAL_METRICS = ("validation/loss", "validation/perplexity", "train/loss_average", "speed/tokens_per_s", "health/non_finite_steps")
"""The curves whose last value runs are compared by."""
EXTENSION_EVALUATION = "extension_evaluation/"
"""The beginning of the names of curves that an extension logs in evaluations."""

MEASURES = "measures/"
"""The beginning of the names of curves that the objective of a run measures in evaluations."""


def points_of(event: Event) -> Points:
    """Return the points of an event. A value that is not known has no point."""
    points: dict[str, float | None] = {}
    match event:
        case StepMetrics():
            points = {
                "train/loss": event.loss,
                "train/loss_average": event.loss_average,
                "train/perplexity": event.perplexity,
                "train/gradient_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "train/learning_rate_muon": event.muon_lr,
                "speed/tokens_per_s": event.tokens_per_s,
                "speed/mfu": event.mfu,
                "speed/loader_wait_s": event.loader_wait_s,
                "speed/loader_wait_share": event.loader_wait_share,
                "speed/monitor_share": event.monitor_share,
                "health/non_finite_steps": float(event.non_finite_steps),
            } | {encodable(f"train/{name}"): value for name, value in event.measures.items()}
        case EvalEvent() | ScoresEvent() | MeasuresEvent():
            points = _points_of_evaluation(event)
        case ScalarsEvent():
            folder = EXTENSION_EVALUATION if event.hook == "on_evaluate" else "extension/"
            points = {f"{folder}{name}": value for name, value in event.values.items()}
        case LayersEvent():
            for layer in event.gradient_norm:
                points[f"gradient_norm/{layer}"] = event.gradient_norm[layer]
                points[f"weight_norm/{layer}"] = event.weight_norm[layer]
                points[f"update_ratio/{layer}"] = event.update_ratio[layer]
        case HardwareEvent():
            points = {f"host/{name}": value for name, value in event.host.items()}
            points["host/memory_growth_mb_per_1000_steps"] = event.host_memory_mb_per_1000_steps
            for gpu in event.gpus:
                points |= {f"gpu_{gpu['index']}/{name}": value for name, value in _gpu_values(**gpu).items()}
        case SaveEvent():
            points = {"speed/save_stall_s": event.stall_s}
        case Alert():
            points = {f"health/alerts_{event.rule}": float(event.count)}
    return {name: value for name, value in points.items() if value is not None}


def _points_of_evaluation(event: EvalEvent | ScoresEvent | MeasuresEvent) -> dict[str, float | None]:
    match event:
        case ScoresEvent():
            return {f"scores/{name}": value for name, value in event.numbers.items()}
        case MeasuresEvent():
            return {encodable(f"{MEASURES}{name}"): value for name, value in event.values.items()}
    points = {
        "validation/loss": event.val_loss,
        "validation/perplexity": event.perplexity,
        "validation/bits_per_byte": event.bits_per_byte,
        "validation/gap": event.gap,
        "validation/trend_per_1000_steps": event.trend,
    }
    for by, scores in event.groups.items():
        points |= {encodable(f"validation_{by}/{name}"): score.perplexity for name, score in scores.items()}
        losses = {name: score.loss for name, score in scores.items() if not score.has_perplexity}
        points |= {encodable(f"validation_loss_{by}/{name}"): loss for name, loss in losses.items()}
    return points


def _gpu_values(*, index: int, name: str, answers: bool, throttle: Any = None, **others: float) -> dict[str, float]:
    throttled = {} if throttle is None else {"throttled": float(bool(set(throttle) - {"idle"}))}
    return others | throttled | {"answers": float(answers)}
