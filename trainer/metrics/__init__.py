"""Where a run's numbers go: one stream of events, and sinks that keep or show it. Only rank 0 has all of them.

values       what the events carry
sink         what a sink can take
running      what is kept over the steps: moving average, counts
monitor      hands every event to every sink, and to the alert rules
jsonlines    `metrics.jsonl`
terminal     a progress bar, or lines
tensorboard  curves, histograms, texts and pictures, with `layout`, `figures`, `event_files` and `model_graph`
wandb_sink, mlflow_sink   the same numbers in Weights & Biases and MLflow, if they are installed, with `service`
opening      makes the monitor of a run from its settings
"""

from trainer.metrics.monitor import Monitor
from trainer.metrics.setup import opened_monitor
from trainer.metrics.sinks.base import Sink
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.metrics.sinks.tensorboard import TensorBoardSink
from trainer.metrics.sinks.terminal import TerminalSink
from trainer.metrics.step_metrics import RunFacts, Sample, StepFacts, StepMetrics

__all__ = [
    "JsonLinesSink",
    "Monitor",
    "RunFacts",
    "Sample",
    "Sink",
    "StepFacts",
    "StepMetrics",
    "TensorBoardSink",
    "TerminalSink",
    "opened_monitor",
]
