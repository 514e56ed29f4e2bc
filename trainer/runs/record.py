"""`record.json` of a run: identity, environment, result, and the digests of the other files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field

from common.command_line import command_text
from common.errors import CheckpointError, ConfigError
from common.files import open_input, parse_json, sealed, unsealed, write_atomic
from common.settings.model import current_names
from common.untrusted import (
    MAX_NOTE_BYTES,
    MAX_RECORD_BYTES,
    Count,
    InnerName,
    Plain,
    Schema,
    digest_run_file,
    parsed,
    read_run_file,
)
from trainer.config import Precision, TrainConfig
from trainer.runs.adjustments import Adjustment, Adjustments
from trainer.runs.events import SaveEvent
from trainer.runs.layout import LEDGER, METRICS, RECORD, manifest_path, not_a_run, saved_steps
from trainer.runs.metrics_file import CutOff, events_until

_TARGETS = {"classification": "document", "preference": "pair"}
_MAX_RANKS, _MAX_MICRO = 1 << 20, 65536
IMPORTED = "imported"  # the status of a run that holds a published model and was never trained
COMPRESSED = "compressed"  # the status of a run that holds the compressed model of another run
NEVER_TRAINED = (IMPORTED, COMPRESSED)


class Origin(Schema):
    record: str  # digest of the other run's `record.json`
    step: Count
    weights: str  # digest of the weights: those of the checkpoint, or their moving average
    generation: dict[str, Plain] | None = None
    """Advice for sampling of the published model that the weights come from; None: they were trained from random ones."""


class Cleaning(Schema):
    sources: list[str]
    clean: dict[str, Plain]
    html: dict[str, Plain]
    markup: Literal["plain", "html"]
    kind: Literal["prose", "web", "code"]


class RecordedData(Schema):
    root_digest: str
    tokenizer_digest: str = ""
    cleaning: list[Cleaning] = Field(default_factory=list)
    """How the texts were cleaned, in a run that classifies them; older ones lack it."""


class RecordedEnvironment(Schema):
    world_size: Annotated[int, Field(ge=1, le=_MAX_RANKS)] = 1
    torch: str | None = None
    processor: str | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    locks: dict[str, str] = Field(default_factory=dict)
    gpus: list[str] = Field(default_factory=list)
    gpu_memory_bytes: list[Count] = Field(default_factory=list)
    unlocked: dict[str, str] = Field(default_factory=dict)
    __pydantic_extra__: dict[str, str | None]


class Imported(Schema):
    format: str
    model_type: str
    types: list[str]
    files: dict[str, str]
    generation: dict[str, Plain] = Field(default_factory=dict)
    """Advice of the model's directory for sampling."""


class _Measured(Schema):
    perplexity: float | None = None


class _Comparison(Schema):
    before: _Measured = Field(default_factory=_Measured)
    after: _Measured = Field(default_factory=_Measured)


class Compressed(Origin):
    method: str
    group_size: Count | None = None
    share: float | None = None
    comparison: _Comparison = Field(default_factory=_Comparison)


def _with_current_names(values: Any) -> Any:
    return {_CURRENT.get(name, name): value for name, value in values.items()} if isinstance(values, dict) else values


_CURRENT = current_names(TrainConfig)
Facts = Annotated[dict[str, Plain], BeforeValidator(_with_current_names)]
"""Facts of a run by the names that settings have now; older records have others."""


class Earlier(Schema):
    until: Count
    was: Facts


class Record(Schema):
    """The content of `record.json`. `Schema.to_json` returns what `write_record` writes."""

    format: int = 1
    status: str
    identity: Facts
    environment: RecordedEnvironment
    changes: list[Adjustment] = Field(default_factory=list)
    precision: dict[str, Plain] = Field(default_factory=dict)
    data: RecordedData
    earlier: list[Earlier] = Field(default_factory=list)
    files: dict[InnerName, str]
    origin: Origin | None = None
    initial: Origin | None = None
    imported: Imported | None = None
    compressed: Compressed | None = None
    step: Count | None = None
    weights: str | None = None
    trained_weights: Count | None = None
    total_weights: Count | None = None
    ended_by: str | None = None
    alerts: dict[str, Count] = Field(default_factory=dict)

    @property
    def generation(self) -> dict[str, Plain] | None:
        """Advice for sampling of the published model that the run holds or began with, None if it is of no such model."""
        holder = self.imported or self.initial or self.compressed
        return None if holder is None else holder.generation

    @property
    def adjustments(self) -> Adjustments:
        return Adjustments(tuple(self.changes))

    def changed(self, **values: Any) -> Record:
        return self.model_copy(update=values)


def check_was_trained(run: Path, record: Record | None) -> None:
    if record is not None and record.status in NEVER_TRAINED:
        raise ConfigError(
            f"{run}: its model is {record.status} and was not trained here, so it has no steps; begin a new run with its "
            f"weights: {command_text('train', '--init', run, '--run', 'NEW')}"
        )


def check_nothing_saved(run: Path, record: Record | None) -> None:
    """Without this check the run would start again and lose its history. A first save that was not completed does not count."""
    if record is None:
        return
    saved = {event.step for event in events_until(run / METRICS, CutOff(sys.maxsize)) if isinstance(event, SaveEvent)}
    if len(saved) > 1 or (saved and record.status in ("finished", "stopped")):
        raise CheckpointError(
            f"{run}: steps up to {max(saved)} were saved, and no checkpoint is there any more; put `checkpoints` back, "
            "or, to start again, use another --run or remove this folder"
        )


def note_adjustment(run: Path, adjustment: Adjustment) -> None:
    record = parse_record(run, record_bytes(run))
    write_record(run, record.changed(changes=[*record.changes, adjustment]))


def leave_note(run: Path, adjustment: Adjustment, rank: int) -> None:
    write_atomic(run / f"change-{rank}.json", json.dumps(Adjustments((adjustment,)).to_json()).encode())


def noted_adjustments(run: Path) -> list[Adjustment]:
    adjustments: list[Adjustment] = []
    for path in sorted(run.glob("change-*.json")):
        data = read_run_file(path, MAX_NOTE_BYTES, run)
        try:
            adjustments += Adjustments.from_json(parse_json(data)).made
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}; no rank wrote this file: restore it from a copy, or remove it") from None
    return adjustments


def complete_record(
    run: Path, *, status: str, ended_by: str | None, step: int, weights_digest: str | None, alerts: Mapping[str, int]
) -> None:
    """Called when nothing more will be written. `ended_by` is the limit, the evaluations, a stop request's source or the error."""
    record = parse_record(run, record_bytes(run))
    manifests = [manifest_path(run, saved).relative_to(run).as_posix() for saved in saved_steps(run)]
    written = [name for name in (METRICS, LEDGER.as_posix(), *manifests) if (run / name).exists()]
    files = record.files | digests_of(run, written)
    for name in {METRICS, LEDGER.as_posix()}.intersection(written):  # some of their lines are newer than the last checkpoint
        with open_input(run / name, below=run) as file:
            os.fsync(file.fileno())
    ended = record.changed(files=files, status=status, ended_by=ended_by, step=step, weights=weights_digest, alerts=dict(alerts))
    write_record(run, ended)


def target_word(identity: Mapping[str, Any]) -> str:
    return _TARGETS.get(str(identity.get("objective")), "token")


def record_bytes(run: Path) -> bytes:
    try:
        return read_run_file(run / RECORD, MAX_RECORD_BYTES, run)
    except FileNotFoundError:
        raise CheckpointError(not_a_run(run, RECORD)) from None


def parse_record(run: Path, content: bytes) -> Record:
    path = run / RECORD
    try:
        found = unsealed(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: the file was changed ({error}); restore it from a copy") from None
    try:
        return parsed(Record, found)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; the file was changed: restore it from a copy") from None


def write_record(run: Path, record: Record) -> None:
    write_atomic(run / RECORD, sealed(record.to_json()))


def recorded_micro(run: Path, record: Record | None) -> int | None:
    """Return the rows of a micro-batch with which a run was started, None if there is no run."""
    if record is None:
        return None
    micro = record.identity.get("batch.micro_batch_size")
    if micro is None:
        return None
    if type(micro) is not int or not 1 <= micro <= _MAX_MICRO:
        raise CheckpointError(
            f"{run / RECORD}: identity has batch.micro_batch_size = {micro!r}, but a number from 1 to {_MAX_MICRO} was expected; "
            "restore it from a copy"
        )
    return micro


def recorded_precision(run: Path, record: Record | None) -> Precision | None:
    """Return the number format with which a run was started, None if there is no run."""
    if record is None:
        return None
    found = record.identity.get("precision")
    if found not in get_args(Precision):
        raise CheckpointError(
            f"{run / RECORD}: identity has precision = {found!r}, but one of {', '.join(get_args(Precision))} was expected; "
            "restore it from a copy"
        )
    return cast("Precision", found)


def digests_of(run: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: digest_run_file(run, name) for name in names}
