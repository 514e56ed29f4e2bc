"""Reads the files of a run's directory. A run that still trains, or was stopped or killed, has less of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import CheckpointError
from common.files import digest_bytes
from common.html.curves import Curve, median
from common.redaction import redacted_settings
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.toml import parse_toml
from common.untrusted import read_run_file
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.manifest import parse_manifest
from trainer.run.events import METRICS, read_events
from trainer.run.record import read_record

__all__ = ["Event", "RecordedRun", "SavedCheckpoint", "groups_of", "number", "part", "read_run", "tables"]

Event = Mapping[str, Any]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in the run's directory. Its tensors are not read."""

    step: int
    num_bytes: int | None = None
    """Bytes of its tensor files. A file that checkpoints share counts for each of them. None if the manifest is damaged."""
    num_weights: int | None = None
    digest: str | None = None
    """Digest of the manifest, which has the digests of all tensors."""


@dataclass(frozen=True)
class RecordedRun:
    """The files of a run, read once."""

    path: Path
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    """The settings of the last start, by section."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The metrics of the training steps, by their names in `metrics.jsonl`."""
    events: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    """All other events in that file, by kind."""
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def name(self) -> str:
        """The last part of the directory's path."""
        return self.path.resolve().name

    @property
    def status(self) -> str:
        """`training`, `stopped`, `failed` or `finished`. A run that was killed stays `training`."""
        return str(self.record.get("status", "training"))

    @property
    def step(self) -> int:
        """The last step in the metrics."""
        steps = [int(event.get("step", 0)) for event in self.of("eval")]
        loss = self.curve("loss")
        return max([*steps, int(loss.x_N[-1]) if len(loss) else 0])

    @property
    def num_weights(self) -> int | None:
        """Number of the model's weights, None if no manifest of a checkpoint can be read."""
        return next((saved.num_weights for saved in reversed(self.checkpoints) if saved.num_weights is not None), None)

    @property
    def seconds(self) -> float:
        """Duration of all steps in seconds, without evaluations and saves."""
        return float(self.curve("seconds").finite.sum())

    @property
    def tokens_per_s(self) -> float | None:
        """Median of the tokens per second over the steps, None if no step is recorded."""
        return median(self.curve("tokens_per_s").y_N)

    @property
    def best(self) -> Event | None:
        """The evaluation with the lowest loss, the first one if several are equal."""
        finite = [event for event in self.of("eval") if math.isfinite(number(event.get("val_loss")) or math.nan)]
        return min(finite, key=lambda event: float(event["val_loss"]), default=None)

    def curve(self, name: str) -> Curve:
        """Return the curve of a metric of the training steps, empty if it was not recorded."""
        return self.curves.get(name) or Curve.of(())

    def of(self, kind: str) -> Sequence[Event]:
        """Return the events of one kind, in their order."""
        return self.events.get(kind, ())

    def curve_of(self, kind: str, name: str) -> Curve:
        """Return the curve of a number in the events of one kind."""
        points = ((number(event.get("step")), number(event.get(name))) for event in self.of(kind))
        return Curve.of((step, value) for step, value in points if step is not None and value is not None)


def number(value: object) -> float | None:
    """Return a number from JSON, where text such as `"nan"` and `"inf"` is a number too. None for all other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the table under a name, empty if there is none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def tables(event: Event, name: str) -> list[Event]:
    """Return the list of tables under a name, empty if there is none."""
    found = event.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def groups_of(event: Event, name: str) -> list[Event]:
    """Return the groups of an evaluation, each with its `name`. The event has a list, or a table by name."""
    return tables(event, name) or [
        {"name": group, **values} for group, values in part(event, name).items() if isinstance(values, Mapping)
    ]


def read_run(path: Path) -> RecordedRun:
    """Read a run's record, settings, metrics and the manifests of its checkpoints.

    Raises:
        CheckpointError: the directory has no run, or a file of it was changed or is damaged.
    """
    record = read_record(path)
    metrics = path / METRICS
    curves, events = _sorted(read_events(metrics) if metrics.exists() else ())
    return RecordedRun(path, record, _settings(path), curves, events, _checkpoints(path))


def _settings(path: Path) -> Mapping[str, Any]:
    file = path / "config.toml"
    try:
        settings = parse_toml(read_run_file(file, MAX_SETTINGS_BYTES, path))["train"]
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing; restore it from a copy") from None
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{file}: not the settings of a run ({error}); restore it from a copy") from None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{file}: train is not a table of settings; restore it from a copy")
    return redacted_settings(settings)


def _sorted(events: Iterable[Event]) -> tuple[dict[str, Curve], dict[str, list[Event]]]:
    """Return the metrics of the training steps as curves, and all other events by kind."""
    places: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    others: dict[str, list[Event]] = {}
    for event in events:
        if event["event"] != "train":
            others.setdefault(event["event"], []).append(event)
            continue
        for name, given in event.items():
            if name not in ("event", "step", "loss_hex") and (value := number(given)) is not None:
                places.setdefault(name, []).append(event["step"])
                values.setdefault(name, []).append(value)
    curves = {name: Curve(np.array(places[name], np.float64), np.array(values[name], np.float64)) for name in places}
    return curves, others


def _checkpoints(path: Path) -> list[SavedCheckpoint]:
    store = CheckpointStore(path / "checkpoints")
    found = []
    for step in store.steps():
        try:
            data = store.manifest_bytes(step)
            manifest = parse_manifest(data)
        except (ValueError, CheckpointError):
            if store.path(step).exists():  # otherwise the run, which still trains, has deleted it since
                found.append(SavedCheckpoint(step))
            continue
        weights = sum(math.prod(one.spec.shape) for name, one in manifest.tensors.items() if name.startswith("model/"))
        found.append(SavedCheckpoint(step, sum(manifest.objects.values()), weights, digest_bytes(data)))
    return found
