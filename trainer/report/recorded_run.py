"""Reads the files of a run's directory. A run that still trains, or was stopped or killed, has less of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from common.errors import CheckpointError
from common.html.chart import Curve, median
from common.redaction import redacted_settings
from trainer.runs.events import AlertEvent, EvalEvent, Event, TrainEvent
from trainer.runs.layout import METRICS, manifest_path
from trainer.runs.metric import metrics_of
from trainer.runs.metrics_file import read_events
from trainer.runs.record import Record, target_word
from trainer.runs.saved_run import SavedRun

T = TypeVar("T")


@dataclass(frozen=True)
class SavedCheckpoint:
    step: int
    num_bytes: int | None = None
    """Bytes of its tensor files. A file that checkpoints share counts for each of them. None if the manifest is damaged."""
    num_weights: int | None = None
    digest: str | None = None  # digest of the manifest, which has the digests of all tensors


@dataclass(frozen=True)
class RecordedRun:
    path: Path
    record: Record
    config: Mapping[str, Any]
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The metrics of the training steps, by the names of the fields of `TrainEvent`."""
    events: Mapping[type, Sequence[Event]] = field(default_factory=dict)
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def step(self) -> int:
        steps = [event.step for event in self.evaluations]
        loss = self.curve("loss")
        return max([*steps, int(loss.x_N[-1]) if len(loss) else 0])

    @property
    def seconds(self) -> float:
        # without evaluations and saves
        return float(self.curve("seconds").finite.sum())

    @property
    def tokens_per_s(self) -> float | None:
        return median(self.curve("tokens_per_s").y_N)

    @property
    def mfu(self) -> float | None:
        return median(self.curve("mfu").y_N)

    @property
    def evaluations(self) -> Sequence[EvalEvent]:
        return self.of(EvalEvent)

    @property
    def target(self) -> str:
        return target_word(self.record.identity)

    @property
    def has_perplexity(self) -> bool:
        return self.target == "token"

    @property
    def alerts(self) -> Sequence[AlertEvent]:
        return self.of(AlertEvent)

    @property
    def best(self) -> EvalEvent | None:
        finite = [event for event in self.evaluations if math.isfinite(event.val_loss)]
        return min(finite, key=lambda event: event.val_loss, default=None)

    def curve(self, name: str) -> Curve:
        return self.curves.get(name) or Curve.of(())

    def of(self, kind: type[T]) -> Sequence[T]:
        return cast(Sequence[T], self.events.get(kind, ()))

    def validation(self, name: str) -> Curve:
        points = ((event.step, getattr(event, name)) for event in self.evaluations)
        return Curve.of((step, value) for step, value in points if value is not None)


def part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def read_run(path: Path) -> RecordedRun:
    """Read a run without its tensors. Raises CheckpointError if there is no run, or a file of it is damaged."""
    saved = SavedRun(path)
    record = saved.record
    points: dict[str, tuple[list[float], list[float]]] = {}
    others: dict[type, list[Event]] = {}
    for event in read_events(path / METRICS) if (path / METRICS).exists() else ():
        if not isinstance(event, TrainEvent):
            others.setdefault(type(event), []).append(event)
            continue
        if not points:
            found = {name: getattr(event, name) for name in metrics_of(TrainEvent)}
            points = {name: ([], []) for name, value in found.items() if not isinstance(value, str | bool | Mapping)}
        for name, (steps, values) in points.items():
            if (value := getattr(event, name)) is not None:
                steps.append(event.step)
                values.append(value)
    curves = {name: Curve(np.array(steps, np.float64), np.array(values, np.float64)) for name, (steps, values) in points.items()}
    checkpoints = []
    for step in saved.steps:
        try:
            manifest = saved.manifest(step)
        except (OSError, CheckpointError):
            if manifest_path(path, step).parent.exists():  # otherwise the run, which still trains, has deleted it since
                checkpoints.append(SavedCheckpoint(step))
            continue
        checkpoints.append(SavedCheckpoint(step, sum(manifest.objects.values()), manifest.num_weights, saved.manifest_digest(step)))
    return RecordedRun(path, record, redacted_settings(saved.settings), curves, others, checkpoints)
