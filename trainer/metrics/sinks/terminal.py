"""What people see while a run trains."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, Any

from tqdm import tqdm

from common.terminal import printable
from trainer.evaluation.results import Evaluation
from trainer.health.alerts import Alert
from trainer.metrics.sinks.base import Sink
from trainer.metrics.step_metrics import SampleText, ScoreTable, StepMetrics, numbers_in
from trainer.run.events import Known

__all__ = ["TerminalSink"]


class TerminalSink(Sink):
    """A progress bar on a terminal; elsewhere one dense line every few steps. Layers and hardware are left to the other sinks."""

    def __init__(self, resume_step: int, last_step: int | None, every_steps: int, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._every_steps = every_steps
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=resume_step, unit="step", file=self._stream, dynamic_ncols=True)

    def train(self, metrics: StepMetrics) -> None:
        """Advances the bar, or writes a line if this step is due."""
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"loss {metrics.loss:.4f}, {metrics.tokens_per_s / 1e3:.1f}k tok/s", refresh=False)
        elif metrics.is_due(self._every_steps):
            of_total = f"/{metrics.last_step}" if metrics.last_step else ""
            mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1%}"
            self._line(
                f"step {metrics.step}{of_total}  loss {metrics.loss:.4f}{_average(metrics)}  grad norm {metrics.grad_norm:.3f}  "
                f"lr {metrics.learning_rate:.2e}  {metrics.tokens_per_s / 1e3:.1f}k tok/s{mfu}  loader wait "
                f"{metrics.loader_wait_s * 1e3:.1f} ms"
            )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Writes a line."""
        self._line(
            f"step {step}  validation loss {evaluation.loss:.4f}  perplexity {evaluation.perplexity:.2f}  "
            f"({evaluation.num_targets} targets in {evaluation.num_rows} rows)"
        )

    def samples(self, step: int, samples: Sequence[SampleText], scores: ScoreTable | None) -> None:
        """Writes each text on one line, and the scores on another."""
        for sample in samples:
            self._line(f"step {step}  sample {sample.prompt + sample.text!r}")
        if numbers := numbers_in(scores):
            self._line(f"step {step}  scores  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))

    def alert(self, alert: Alert, count: int) -> None:
        """Writes a line."""
        self._line(printable(f"{alert.severity}: {alert.message}"))

    def rewind(self, known: Known) -> None:
        """Puts the bar back."""
        if self._bar is not None:
            self._bar.n = known.step
            self._bar.refresh()

    def close(self) -> None:
        """Ends the bar's line."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)


def _average(metrics: StepMetrics) -> str:
    """The moving average, where it says something else than the loss itself."""
    return "" if metrics.loss_average is None or metrics.step == 1 else f" (average {metrics.loss_average:.4f})"
