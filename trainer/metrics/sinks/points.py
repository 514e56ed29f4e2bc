"""The events of a run as points of named curves. TensorBoard, Weights & Biases and MLflow show the same names."""

from __future__ import annotations

from trainer.evaluation.results import Evaluation
from trainer.machine.gpus import GpuReading
from trainer.machine.sampler import HardwareReading
from trainer.metrics.layers import LayerReading
from trainer.metrics.step_metrics import StepMetrics, encodable

__all__ = ["FINAL_METRICS", "Points", "evaluation_points", "hardware_points", "layer_points", "saving_points", "train_points"]

Points = dict[str, float]

FINAL_METRICS = ("validation/loss", "validation/perplexity", "train/loss_average", "speed/tokens_per_s", "health/non_finite_steps")
"""The curves whose last value runs are compared by."""


def train_points(metrics: StepMetrics) -> Points:
    """The points of a step; what is not known is left out."""
    return _known(
        {
            "train/loss": metrics.loss,
            "train/loss_average": metrics.loss_average,
            "train/perplexity": metrics.perplexity,
            "train/gradient_norm": metrics.grad_norm,
            "train/learning_rate": metrics.learning_rate,
            "speed/tokens_per_s": metrics.tokens_per_s,
            "speed/mfu": metrics.mfu,
            "speed/loader_wait_s": metrics.loader_wait_s,
            "speed/loader_wait_share": metrics.loader_wait_share,
            "speed/monitor_share": metrics.monitor_share,
            "health/non_finite_steps": float(metrics.non_finite_steps),
        }
    )


def evaluation_points(evaluation: Evaluation) -> Points:
    """The points of a validation, and of its groups such as `validation_source/code`, as perplexities."""
    points: dict[str, float | None] = {
        "validation/loss": evaluation.loss,
        "validation/perplexity": evaluation.perplexity,
        "validation/bits_per_byte": evaluation.bits_per_byte,
    }
    for by, scores in evaluation.groups.items():
        points |= {encodable(f"validation_{by}/{name}"): score.perplexity for name, score in scores.items()}
    return _known(points)


def layer_points(reading: LayerReading) -> Points:
    """Three points for each layer."""
    points = {}
    for name, norms in reading.norms.items():
        points[f"gradient_norm/{name}"] = norms.gradient
        points[f"weight_norm/{name}"] = norms.weight
        points[f"update_ratio/{name}"] = norms.update_ratio
    return points


def hardware_points(reading: HardwareReading, memory_trend: float | None) -> Points:
    """The points of a reading, such as `gpu_0/temperature_c` and `host/cpu`."""
    points: dict[str, float | None] = {f"host/{name}": value for name, value in vars(reading.host).items()}
    points["host/memory_growth_mb_per_1000_steps"] = memory_trend
    for gpu in reading.gpus:
        points |= {f"gpu_{gpu.index}/{name}": value for name, value in _gpu_values(gpu).items()}
    return _known(points)


def saving_points(stall_s: float) -> Points:
    """The point of a checkpoint: how long training waited for it to be handed over."""
    return {"speed/save_stall_s": stall_s}


def _gpu_values(gpu: GpuReading) -> dict[str, float | None]:
    plain = {name: value for name, value in vars(gpu).items() if name not in ("index", "name", "answers", "throttle")}
    throttled = None if gpu.throttle is None else float(bool(set(gpu.throttle) - {"idle"}))
    return plain | {"throttled": throttled, "answers": float(gpu.answers)}


def _known(points: dict[str, float | None]) -> Points:
    return {name: value for name, value in points.items() if value is not None}
