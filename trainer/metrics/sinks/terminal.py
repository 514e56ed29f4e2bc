"""The terminal output of a run that trains."""

from __future__ import annotations

import sys
from typing import IO, Any

from tqdm import tqdm

from common.terminal import printable
from trainer.metrics.sinks.base import Sink
from trainer.metrics.step_metrics import StepMetrics
from trainer.run.events import AlertEvent, EvalEvent, Event, SampleEvent, ScoresEvent
from trainer.run.metrics_file import Known

__all__ = ["TerminalSink"]


class TerminalSink(Sink):
    """Shows a progress bar on a terminal, and elsewhere one line every few steps. It does not show layers and hardware."""

    def __init__(self, resume_step: int, last_step: int | None, every_steps: int, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._every_steps = every_steps
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=resume_step, unit="step", file=self._stream, dynamic_ncols=True)

    def write(self, event: Event) -> None:
        """Advance the bar after a step, or write a line if the step is due; write a line for the other events that people read."""
        match event:
            case StepMetrics():
                self._train(event)
            case EvalEvent():
                self._line(
                    f"step {event.step}  validation loss {event.val_loss:.4f}  perplexity {event.perplexity:.2f}  "
                    f"({event.targets} targets in {event.num_rows} rows)"
                )
            case SampleEvent():
                self._line(f"step {event.step}  sample {event.whole!r}")
            case ScoresEvent(numbers=numbers) if numbers:
                self._line(f"step {event.step}  scores  " + "  ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
            case AlertEvent():
                self._line(printable(f"{event.severity}: {event.message}"))

    def rewind(self, known: Known) -> None:
        """Move the bar back."""
        if self._bar is not None:
            self._bar.n = known.step
            self._bar.refresh()

    def close(self) -> None:
        """End the line of the bar."""
        if self._bar is not None:
            self._bar.close()

    def _train(self, metrics: StepMetrics) -> None:
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"loss {metrics.loss:.4f}, {metrics.tokens_per_s / 1e3:.1f}k tok/s", refresh=False)
        elif metrics.is_due(self._every_steps):
            of_total = f"/{metrics.last_step}" if metrics.last_step else ""
            average = "" if metrics.loss_average is None or metrics.step == 1 else f" (average {metrics.loss_average:.4f})"
            muon = "" if metrics.muon_lr is None else f", muon {metrics.muon_lr:.2e}"
            mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1%}"
            self._line(
                f"step {metrics.step}{of_total}  loss {metrics.loss:.4f}{average}  grad norm {metrics.grad_norm:.3f}  "
                f"lr {metrics.learning_rate:.2e}{muon}  {metrics.tokens_per_s / 1e3:.1f}k tok/s{mfu}  loader wait "
                f"{metrics.loader_wait_s * 1e3:.1f} ms"
            )

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)
