"""Where a run's numbers go: `metrics.jsonl`, TensorBoard and the terminal. Only rank 0 has sinks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from data_pipeline.files import write_atomic
from trainer.evaluate import Evaluation
from trainer.state import Progress

__all__ = ["JsonLinesSink", "Monitor", "Sink", "StepFacts", "StepMetrics", "TensorBoardSink", "TerminalSink"]


@dataclass(frozen=True)
class StepMetrics:
    """What is known after a step."""

    step: int
    last_step: int | None
    """The step at which the limits will end the run, if that is known."""
    loss: float
    grad_norm: float
    learning_rate: float
    targets: int
    """Targets trained on so far."""
    tokens_per_s: float
    """Targets of this step over its duration."""
    mfu: float | None
    """Share of the GPUs' peak rate that the model's arithmetic uses; None where the peak is not known."""
    loader_wait_s: float
    """Part of that duration spent waiting for data."""


@dataclass(frozen=True)
class StepFacts:
    """What the host knows of a step when it begins it."""

    progress: Progress
    """The counters after it."""
    learning_rate: float
    num_targets: int
    """Targets of this step."""
    loader_wait_s: float
    """How long the step waited for its data."""
    rows: NDArray[np.int64]
    """The rows of its global batch, in order."""


class Sink(Protocol):
    """Something that shows or keeps a run's numbers."""

    def train(self, metrics: StepMetrics) -> None:
        """Takes the numbers of one step."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Takes the result of a validation."""

    def sample(self, step: int, text: str) -> None:
        """Takes a text that the model wrote."""

    def saving(self, step: int, stall_s: float) -> None:
        """Takes how long training waited for a checkpoint of this step to be handed over."""

    def alert(self, step: int, message: str) -> None:
        """Takes what the guard found."""

    def rewind(self, step: int) -> None:
        """Forgets what came after a step, because the run goes back to it."""

    def close(self) -> None:
        """Finishes what was begun."""


class Monitor:
    """Hands every number to every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = tuple(sinks)

    def train(self, metrics: StepMetrics) -> None:
        """Passes on the numbers of one step."""
        for sink in self._sinks:
            sink.train(metrics)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Passes on the result of a validation."""
        for sink in self._sinks:
            sink.evaluation(step, evaluation)

    def sample(self, step: int, text: str) -> None:
        """Passes on a text that the model wrote."""
        for sink in self._sinks:
            sink.sample(step, text)

    def saving(self, step: int, stall_s: float) -> None:
        """Passes on how long training waited for a checkpoint."""
        for sink in self._sinks:
            sink.saving(step, stall_s)

    def alert(self, step: int, message: str) -> None:
        """Passes on what the guard found."""
        for sink in self._sinks:
            sink.alert(step, message)

    def rewind(self, step: int) -> None:
        """Has every sink forget what came after a step."""
        for sink in self._sinks:
            sink.rewind(step)

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            sink.close()


class JsonLinesSink:
    """`metrics.jsonl`: one object a line, each step once; losses also as exact hexadecimal floats."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self._path = path
        if path.exists():
            write_atomic(path, b"" if resume_step is None else _lines_until(path, resume_step))
        self._file = path.open("a", encoding="utf-8")

    def train(self, metrics: StepMetrics) -> None:
        """Appends a line of event `train`."""
        self._write(
            {
                "event": "train",
                "step": metrics.step,
                "loss": metrics.loss,
                "loss_hex": metrics.loss.hex(),
                "grad_norm": metrics.grad_norm,
                "lr": metrics.learning_rate,
                "tokens": metrics.targets,
                "tokens_per_s": round(metrics.tokens_per_s, 1),
                "mfu": None if metrics.mfu is None else round(metrics.mfu, 4),
                "loader_wait_s": round(metrics.loader_wait_s, 6),
            }
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Appends a line of event `eval`."""
        self._write(
            {
                "event": "eval",
                "step": step,
                "val_loss": evaluation.loss,
                "val_loss_hex": evaluation.loss.hex(),
                "perplexity": evaluation.perplexity,
                "targets": evaluation.num_targets,
            }
        )

    def sample(self, step: int, text: str) -> None:
        """Appends a line of event `sample`."""
        self._write({"event": "sample", "step": step, "text": text})

    def saving(self, step: int, stall_s: float) -> None:
        """Appends a line of event `save`."""
        self._write({"event": "save", "step": step, "stall_s": round(stall_s, 6)})

    def alert(self, step: int, message: str) -> None:
        """Appends a line of event `alert`."""
        self._write({"event": "alert", "step": step, "message": message})

    def rewind(self, step: int) -> None:
        """Cuts off the lines after a step."""
        self._file.close()
        write_atomic(self._path, _lines_until(self._path, step))
        self._file = self._path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        # JSON has no word for a number that is not finite; a string keeps it visible and the line readable for every parser.
        plain = {
            key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in event.items()
        }
        self._file.write(json.dumps(plain, ensure_ascii=False) + "\n")
        self._file.flush()


def _lines_until(path: Path, step: int) -> bytes:
    """The whole lines of a metrics file up to a step; what a killed run wrote beyond its last checkpoint will be written again."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except ValueError:  # the line that was being written when the run was killed
            continue
    return b"".join(kept)


class TensorBoardSink:
    """Scalars every few steps, samples as text. Points beyond the resumed step, left by a killed run, are hidden by TensorBoard."""

    def __init__(self, directory: Path, resume_step: int | None, every_steps: int) -> None:
        self._directory = directory
        self._writer = SummaryWriter(str(directory), purge_step=0 if resume_step is None else resume_step + 1)
        self._every_steps = every_steps

    def train(self, metrics: StepMetrics) -> None:
        """Adds a point to each training curve, if this step is due."""
        if metrics.step % self._every_steps and metrics.step != 1:
            return
        for tag, value in (
            ("train/loss", metrics.loss),
            ("train/gradient_norm", metrics.grad_norm),
            ("train/learning_rate", metrics.learning_rate),
            ("speed/tokens_per_s", metrics.tokens_per_s),
            ("speed/loader_wait_s", metrics.loader_wait_s),
            ("speed/mfu", metrics.mfu),
        ):
            if value is not None:
                self._writer.add_scalar(tag, value, metrics.step)

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Adds a point to each validation curve."""
        self._writer.add_scalar("validation/loss", evaluation.loss, step)
        self._writer.add_scalar("validation/perplexity", evaluation.perplexity, step)
        self._writer.flush()

    def sample(self, step: int, text: str) -> None:
        """Adds the text, as a block that keeps its line breaks."""
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        self._writer.add_text("sample", indented, step)

    def saving(self, step: int, stall_s: float) -> None:
        """Adds a point to its curve."""
        self._writer.add_scalar("speed/save_stall_s", stall_s, step)

    def alert(self, step: int, message: str) -> None:
        """Adds the text."""
        self._writer.add_text("alert", message, step)

    def rewind(self, step: int) -> None:
        """Begins another file, which hides the points after a step."""
        self._writer.close()
        self._writer = SummaryWriter(str(self._directory), purge_step=step + 1)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._writer.close()


class TerminalSink:
    """A progress bar on a terminal; elsewhere one dense line every few steps."""

    def __init__(self, resume_step: int, last_step: int | None, every_steps: int, stream: IO[str] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._every_steps = every_steps
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=resume_step, unit="step", file=self._stream, dynamic_ncols=True)

    def train(self, metrics: StepMetrics) -> None:
        """Advances the bar, or writes a line if this step is due."""
        last = metrics.step == metrics.last_step
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(f"loss {metrics.loss:.4f}, {metrics.tokens_per_s / 1e3:.1f}k tok/s", refresh=False)
        elif metrics.step % self._every_steps == 0 or metrics.step == 1 or last:
            of_total = f"/{metrics.last_step}" if metrics.last_step else ""
            mfu = "" if metrics.mfu is None else f"  MFU {metrics.mfu:.1%}"
            self._line(
                f"step {metrics.step}{of_total}  loss {metrics.loss:.4f}  grad norm {metrics.grad_norm:.3f}  "
                f"lr {metrics.learning_rate:.2e}  {metrics.tokens_per_s / 1e3:.1f}k tok/s{mfu}  loader wait "
                f"{metrics.loader_wait_s * 1e3:.1f} ms"
            )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Writes a line."""
        self._line(
            f"step {step}  validation loss {evaluation.loss:.4f}  perplexity {evaluation.perplexity:.2f}  "
            f"({evaluation.num_targets} targets in {evaluation.num_rows} rows)"
        )

    def sample(self, step: int, text: str) -> None:
        """Writes the text on one line."""
        self._line(f"step {step}  sample {text!r}")

    def saving(self, step: int, stall_s: float) -> None:
        """Nothing: a save is no news for people."""

    def alert(self, step: int, message: str) -> None:
        """Writes a line."""
        self._line(f"guard: {message}")

    def rewind(self, step: int) -> None:
        """Puts the bar back."""
        if self._bar is not None:
            self._bar.n = step
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
