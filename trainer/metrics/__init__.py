"""Hands the events of a run to its sinks. Only rank 0 has all events."""

from trainer.metrics.monitor import Monitor, opened_monitor
from trainer.metrics.sinks.base import LearningRates, RunFacts, Sink, StepFacts, StepMetrics
from trainer.metrics.sinks.json_lines import JsonLinesSink
from trainer.metrics.sinks.tensorboard import TensorBoardSink
from trainer.metrics.sinks.terminal import TerminalSink

__all__ = [
    "JsonLinesSink",
    "LearningRates",
    "Monitor",
    "RunFacts",
    "Sink",
    "StepFacts",
    "StepMetrics",
    "TensorBoardSink",
    "TerminalSink",
    "opened_monitor",
]
