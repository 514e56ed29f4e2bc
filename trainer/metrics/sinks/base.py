"""The interface of a sink. A sink overrides the methods that it needs."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.metrics.layers import LayerReading
from trainer.metrics.step_metrics import RunFacts
from trainer.runs.events import Event, SampleEvent, ScoresEvent
from trainer.runs.metrics_file import CutOff

__all__ = ["Sink"]


class Sink:
    """Shows or stores the events of a run."""

    def begin(self, facts: RunFacts) -> None:
        """Take the facts about the run; called before all other methods."""

    def model(self, graph: bytes) -> None:
        """Take the graph of the model, a serialised `GraphDef`."""

    def write(self, event: Event) -> None:
        """Take an event. An event `train` is a `StepMetrics`, and an event `alert` an `Alert`."""

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        """Take the samples of one evaluation and their scores."""
        for sample in samples:
            self.write(sample)
        if scores is not None:
            self.write(scores)

    def histograms(self, reading: LayerReading) -> None:
        """Take histograms of the layers, if the reading has any; they are no event."""

    def rewind(self, known: CutOff) -> None:
        """Remove all events that the state does not cover to which the run goes back."""

    def sync(self) -> None:
        """Force all events to the device; called before a checkpoint that relies on them."""

    def finish(self, status: str) -> None:
        """Take how the run ended: `finished` or `stopped`; not called if it failed."""

    def close(self) -> None:
        """Close files and connections."""
