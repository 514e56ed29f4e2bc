"""`metrics.jsonl`: one object a line, for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from common.errors import StorageError
from common.files import plain, sync_directory, write_atomic
from common.storage_errors import explain_os_error, naming
from trainer.evaluation.results import Evaluation
from trainer.health.alerts import Alert
from trainer.machine.sampler import HardwareReading
from trainer.metrics.layers import LayerReading
from trainer.metrics.sinks.base import Sink
from trainer.metrics.step_metrics import SampleText, ScoreTable, StepMetrics
from trainer.run.directory import open_own
from trainer.run.events import Known, lines_until

__all__ = ["JsonLinesSink", "NodeHardwareSink"]


class JsonLinesSink(Sink):
    """One object a line, each step once; losses also as exact hexadecimal floats.

    Args:
        path: the file; it is cut to where the run goes on from.
        known: what it knows there; None where the run begins.

    Raises:
        StorageError: from here and every method, where the file cannot be written.
        CheckpointError: it is no regular file, or a link leads to it.
    """

    def __init__(self, path: Path, known: Known | None) -> None:
        self._path = path
        with self._stored():
            if path.exists():
                write_atomic(path, b"" if known is None else _known_lines(path, known))
            self._file = self._opened()
            sync_directory(path.parent)

    def train(self, metrics: StepMetrics) -> None:
        """Appends a line of event `train`."""
        self._write(
            {
                "event": "train",
                "step": metrics.step,
                "loss": metrics.loss,
                "loss_hex": metrics.loss.hex(),
                "loss_average": metrics.loss_average,
                "perplexity": metrics.perplexity,
                "grad_norm": metrics.grad_norm,
                "lr": metrics.learning_rate,
                "tokens": metrics.targets,
                "tokens_per_s": round(metrics.tokens_per_s, 1),
                "mfu": _rounded(metrics.mfu, 4),
                "seconds": _rounded(metrics.seconds, 6),
                "loader_wait_s": round(metrics.loader_wait_s, 6),
                "monitor_s": _rounded(metrics.monitor_s, 6),
            }
        )

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Appends a line of event `eval`."""
        facts: dict[str, Any] = {
            "event": "eval",
            "step": step,
            "val_loss": evaluation.loss,
            "val_loss_hex": evaluation.loss.hex(),
            "perplexity": evaluation.perplexity,
            "targets": evaluation.num_targets,
        }
        if evaluation.bits_per_byte is not None:
            facts["bits_per_byte"] = evaluation.bits_per_byte
        groups = {f"by_{by}": {name: score.to_json() for name, score in scores.items()} for by, scores in evaluation.groups.items()}
        self._write(facts | {by: scores for by, scores in groups.items() if scores})

    def samples(self, step: int, samples: Sequence[SampleText], scores: ScoreTable | None) -> None:
        """Appends a line of event `sample` for each text, and one of event `scores`."""
        for sample in samples:
            self._write({"event": "sample", "step": step, "prompt": sample.prompt, "text": sample.prompt + sample.text})
        if scores is not None:
            self._write({"event": "scores", "step": step, **scores.to_json()})

    def layers(self, reading: LayerReading) -> None:
        """Appends a line of event `layers`, if there are norms; histograms go to TensorBoard alone."""
        if reading.norms:
            self._write(
                {
                    "event": "layers",
                    "step": reading.step,
                    "gradient_norm": {name: norms.gradient for name, norms in reading.norms.items()},
                    "weight_norm": {name: norms.weight for name, norms in reading.norms.items()},
                    "update_ratio": {name: norms.update_ratio for name, norms in reading.norms.items()},
                }
            )

    def hardware(self, step: int, reading: HardwareReading, memory_trend: float | None) -> None:
        """Appends a line of event `hardware`."""
        trend = {} if memory_trend is None else {"host_memory_mb_per_1000_steps": round(memory_trend, 3)}
        self._write({"event": "hardware", "step": step, **reading.to_json(), **trend})

    def saving(self, step: int, stall_s: float) -> None:
        """Appends a line of event `save`."""
        self._write({"event": "save", "step": step, "stall_s": round(stall_s, 6)})

    def alert(self, alert: Alert, count: int) -> None:
        """Appends a line of event `alert`."""
        self._write({"event": "alert", **asdict(alert)})

    def end(self, step: int, status: str, ended_by: str | None) -> None:
        """Appends a line of event `end`."""
        self._write({"event": "end", "step": step, "status": status, "ended_by": ended_by})

    def rewind(self, known: Known) -> None:
        """Cuts off the lines that are not known."""
        with self._stored():
            self._file.close()
            write_atomic(self._path, _known_lines(self._path, known))
            self._file = self._opened()

    def sync(self) -> None:
        """Forces all lines to the device, because a run that goes on from a checkpoint needs those of all steps before it."""
        with self._stored():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        with self._stored():
            self._file.close()

    def _opened(self) -> IO[str]:
        """A lone surrogate, which UTF-8 cannot hold, is written as JSON's own escape of it."""
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND, run=self._path.parent)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    def _write(self, event: Mapping[str, Any]) -> None:
        line = json.dumps(plain(event), ensure_ascii=False) + "\n"
        with self._stored():
            self._file.write(line)
            self._file.flush()

    @contextmanager
    def _stored(self) -> Iterator[None]:
        try:
            with naming(self._path):
                yield
        except OSError as error:
            raise StorageError(explain_os_error(error)) from error


class NodeHardwareSink(JsonLinesSink):
    """Readings and alerts of one machine among several, in a file of its own, because the stream is that of the first machine."""

    def train(self, metrics: StepMetrics) -> None:
        """Nothing: the first machine has it."""

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Nothing."""

    def samples(self, step: int, samples: Sequence[SampleText], scores: ScoreTable | None) -> None:
        """Nothing."""

    def saving(self, step: int, stall_s: float) -> None:
        """Nothing."""

    def end(self, step: int, status: str, ended_by: str | None) -> None:
        """Nothing."""


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _known_lines(path: Path, known: Known) -> bytes:
    """The whole lines of a metrics file; what a killed run wrote beyond its last checkpoint will be written again."""
    lines = (line for line, _ in lines_until(path, known))
    return b"".join(line + b"\n" for line in lines)  # a kill can leave a whole line without its end
