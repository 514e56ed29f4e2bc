"""What a run's directory says of it, as far as it is there: a run that goes on, was stopped or was killed has less of it."""

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
    """A checkpoint that is there; its tensors are not read."""

    step: int
    num_bytes: int | None = None
    """Of the files with its tensors; a file that several checkpoints share counts for each. None where its manifest is damaged."""
    num_weights: int | None = None
    digest: str | None = None
    """Of its manifest, which holds those of all its tensors."""


@dataclass(frozen=True)
class RecordedRun:
    """A run, read once."""

    path: Path
    record: Mapping[str, Any]
    config: Mapping[str, Any]
    """The settings that it was last started with, by section."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The numbers of the training steps, by their names in `metrics.jsonl`."""
    events: Mapping[str, Sequence[Event]] = field(default_factory=dict)
    """Everything else in that file, by kind."""
    checkpoints: Sequence[SavedCheckpoint] = ()

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.path.resolve().name

    @property
    def status(self) -> str:
        """`training`, `stopped`, `failed` or `finished`; a run that was killed is still said to be training."""
        return str(self.record.get("status", "training"))

    @property
    def step(self) -> int:
        """The last step that is known."""
        steps = [int(event.get("step", 0)) for event in self.of("eval")]
        loss = self.curve("loss")
        return max([*steps, int(loss.x_N[-1]) if len(loss) else 0])

    @property
    def num_weights(self) -> int | None:
        """Of the model, where a checkpoint tells."""
        return next((saved.num_weights for saved in reversed(self.checkpoints) if saved.num_weights is not None), None)

    @property
    def step_seconds(self) -> Curve:
        """How long each step took, without evaluations and saves."""
        return self.curve("seconds")

    @property
    def seconds(self) -> float:
        """All of these together."""
        return float(self.step_seconds.finite.sum())

    @property
    def tokens_per_s(self) -> float | None:
        """Its median over the steps."""
        return median(self.curve("tokens_per_s").y_N)

    @property
    def best(self) -> Event | None:
        """The evaluation with the lowest loss, the first of those that are equal."""
        finite = [event for event in self.of("eval") if math.isfinite(number(event.get("val_loss")) or math.nan)]
        return min(finite, key=lambda event: float(event["val_loss"]), default=None)

    def curve(self, name: str) -> Curve:
        """Of this number of the training steps; empty where it was not recorded."""
        return self.curves.get(name) or Curve.of(())

    def of(self, kind: str) -> Sequence[Event]:
        """The events of one kind, in their order."""
        return self.events.get(kind, ())

    def curve_of(self, kind: str, name: str) -> Curve:
        """Of this number in the events of one kind."""
        points = ((number(event.get("step")), number(event.get(name))) for event in self.of(kind))
        return Curve.of((step, value) for step, value in points if step is not None and value is not None)


def number(value: object) -> float | None:
    """A number out of JSON, where `"nan"` and `"inf"` stand for what JSON has no word for; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The table under a name; empty where there is none."""
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def tables(event: Event, name: str) -> list[Event]:
    """The list of tables under a name; empty where there is none."""
    found = event.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def groups_of(event: Event, name: str) -> list[Event]:
    """The groups of an evaluation, each with its `name`, whether they are listed or stand under their names."""
    return tables(event, name) or [
        {"name": group, **values} for group, values in part(event, name).items() if isinstance(values, Mapping)
    ]


def read_run(path: Path) -> RecordedRun:
    """Reads a run's record, settings, metrics and the manifests of its checkpoints.

    Raises:
        CheckpointError: the directory holds no run, or a file of it was changed or is damaged; the message names it.
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
        raise CheckpointError(f"{file}: no settings of a run ({error}); restore it from a copy") from None
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{file}: train is no table of settings; restore it from a copy")
    return redacted_settings(settings)


def _sorted(events: Iterable[Event]) -> tuple[dict[str, Curve], dict[str, list[Event]]]:
    """The numbers of the training steps as curves, all other events by kind."""
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
            if store.path(step).exists():  # else it was deleted since, by the run that goes on
                found.append(SavedCheckpoint(step))
            continue
        weights = sum(math.prod(one.spec.shape) for name, one in manifest.tensors.items() if name.startswith("model/"))
        found.append(SavedCheckpoint(step, sum(manifest.objects.values()), weights, digest_bytes(data)))
    return found
