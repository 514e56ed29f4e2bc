"""What a sink can take. Each of the methods does nothing until a sink has a use for its event."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.evaluation.results import Evaluation
from trainer.health.alerts import Alert
from trainer.machine.sampler import HardwareReading
from trainer.metrics.layers import LayerReading
from trainer.metrics.step_metrics import RunFacts, SampleText, ScoreTable, StepMetrics
from trainer.run.events import Known

__all__ = ["Sink"]


class Sink:
    """Something that shows or keeps a run's numbers."""

    def begin(self, facts: RunFacts) -> None:
        """Takes what is known of the run, before all else."""

    def model(self, graph: bytes) -> None:
        """Takes the graph of the model, a serialised `GraphDef`."""

    def train(self, metrics: StepMetrics) -> None:
        """Takes the numbers of one step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Takes the result of a validation."""

    def samples(self, step: int, samples: Sequence[SampleText], scores: ScoreTable | None) -> None:
        """Takes texts that the model wrote, and scores of all of them together."""

    def layers(self, reading: LayerReading) -> None:
        """Takes norms and histograms of the layers."""

    def hardware(self, step: int, reading: HardwareReading, memory_trend: float | None) -> None:
        """Takes what the machine did at about this step, and the growth of the run's memory in MB per 1,000 steps."""

    def saving(self, step: int, stall_s: float) -> None:
        """Takes how long training waited for a checkpoint of this step to be handed over."""

    def alert(self, alert: Alert, count: int) -> None:
        """Takes an alert, and how many of its rule there have been with it."""

    def rewind(self, known: Known) -> None:
        """Forgets all that is not known where the run goes back to."""

    def sync(self) -> None:
        """Forces what it has been given to the device; called before a checkpoint that counts on it."""

    def end(self, step: int, status: str, ended_by: str | None) -> None:
        """Takes how and why the run ended, also where it failed: see `trainer.training.ending`."""

    def finish(self, status: str) -> None:
        """Takes how the run ended: `finished` or `stopped`; not called where it failed."""

    def close(self) -> None:
        """Finishes what was begun."""
