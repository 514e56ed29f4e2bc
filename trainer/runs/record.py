"""`record.json` of a run: identity, environment, result, and the digests of the other files.

`identity` holds all that the bits of the run depend on. A run is resumed only if its identity is the same.
An imported model has the status `imported`, no identity, and `imported` with the digests of the files that it was read from.
`changes` lists the adjustments: from which step on micro-batches were smaller than in the identity, shards were left out, or the
learning rate fell in time for the end of `limits.minutes`.
`origin` names the checkpoint of another run that a branch began with.
`initial` names the checkpoint of another run whose weights this run began with; their digest is also part of the identity.
`precision` holds the setting, the number format that it gave, and the reason; the identity and `config.toml` hold the format.
`trained_weights` and `total_weights` are their numbers, in a run that trains only some.
`earlier` lists starts of the run with another identity or environment, oldest first: the last step, and the differing values.
The record is sealed with a digest, and `files` holds the digests of the other files. It contains no host, user or path, and only
those environment variables that this program names or that set torch.compile, so it contains no secret.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, cast, get_args

import torch
from pydantic import Field
from pydantic_core import to_jsonable_python

from common.command_line import command_text
from common.errors import CheckpointError, ConfigError, PreparedDataError, ProjectError
from common.files import (
    UnusableFileError,
    commit_directory,
    is_unfinished,
    open_input,
    own_folder,
    parse_json,
    sealed,
    unfinished_path,
    unsealed,
    write_atomic,
)
from common.redaction import redacted_settings
from common.settings.dotted import flatten
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.markers import Effect, FixesShapes, Marker
from common.settings.model import all_settings, is_among, markers_of, settings_with
from common.settings.toml import parse_toml, to_toml
from common.untrusted import (
    MAX_NOTE_BYTES,
    MAX_RECORD_BYTES,
    Count,
    Form,
    InnerName,
    Plain,
    digest_run_file,
    parsed,
    read_run_file,
)
from trainer.checkpoint import CheckpointStore
from trainer.config import Precision, TrainConfig
from trainer.config.not_a_run import not_a_run
from trainer.data.adjustments import Adjustment, Adjustments
from trainer.machine.determinism import device_name, flags, not_compared, threads_per_rank
from trainer.machine.environment import (
    Difference,
    environment_facts,
    find_differences,
    nccl_version,
    same_facts,
    shown,
)
from trainer.machine.precision import ChosenPrecision
from trainer.runs.context import RunContext
from trainer.runs.events import SaveEvent
from trainer.runs.ledger import LEDGER
from trainer.runs.metrics_file import METRICS, CutOff, events_until

__all__ = [
    "COMPRESSED",
    "IMPORTED",
    "NEVER_TRAINED",
    "RECORD",
    "Before",
    "Compressed",
    "Earlier",
    "Imported",
    "Origin",
    "Record",
    "RecordedData",
    "RecordedEnvironment",
    "check_data",
    "check_identity",
    "check_nothing_saved",
    "check_was_trained",
    "complete_record",
    "identity_of",
    "leave_note",
    "note_adjustment",
    "note_trained_weights",
    "open_record",
    "read_record",
    "read_record_if_any",
    "recorded_adjustments",
    "recorded_micro",
    "recorded_precision",
    "write_record",
]

_log = logging.getLogger(__name__)
_UNREPORTED = frozenset(settings_with(TrainConfig, Marker.FOLDER, Marker.MOVEABLE, Marker.PER_START))
_IDENTITY = settings_with(TrainConfig, Effect.IDENTITY)
_MAX_RANKS, _MAX_MICRO = 1 << 20, 65536
RECORD = "record.json"
"""The file's name in the run's directory."""
IMPORTED = "imported"
"""The status of a run that holds a published model and was never trained."""
COMPRESSED = "compressed"
"""The status of a run that holds the compressed model of another run."""
NEVER_TRAINED = (IMPORTED, COMPRESSED)


class Origin(Form):
    """A checkpoint of another run that a run began with."""

    record: str
    """Digest of the other run's `record.json`."""
    step: Count
    weights: str
    """Digest of the weights: those of the checkpoint, or their moving average."""


class RecordedData(Form):
    """The prepared data of a run."""

    root_digest: str
    tokenizer_digest: str = ""


class RecordedEnvironment(Form):
    """The facts of `environment_facts` at the last start, and its number of ranks."""

    world_size: Annotated[int, Field(ge=1, le=_MAX_RANKS)] = 1
    torch: str | None = None
    processor: str | None = None
    packages: dict[str, str] = Field(default_factory=dict)
    locks: dict[str, str] = Field(default_factory=dict)
    gpus: list[str] = Field(default_factory=list)
    gpu_memory_bytes: list[Count] = Field(default_factory=list)
    unlocked: dict[str, str] = Field(default_factory=dict)
    __pydantic_extra__: dict[str, str | None]


class Imported(Form):
    """The published model that a run holds, with the digests of the files that it was read from."""

    format: str
    model_type: str
    types: list[str]
    files: dict[str, str]


class _Measured(Form):
    perplexity: float | None = None


class _Comparison(Form):
    before: _Measured = Field(default_factory=_Measured)
    after: _Measured = Field(default_factory=_Measured)


class Compressed(Origin):
    """How the model of a run was compressed, and the checkpoint of the other run that it was made from."""

    method: str
    group_size: Count | None = None
    share: float | None = None
    comparison: _Comparison = Field(default_factory=_Comparison)


class Earlier(Form):
    """The values that differed in an earlier start, and the last step that had them."""

    until: Count
    was: dict[str, Plain]


class Record(Form):
    """The content of `record.json`. `Form.to_json` returns what `write_record` writes."""

    format: int = 1
    status: str
    identity: dict[str, Plain]
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
    def adjustments(self) -> Adjustments:
        return Adjustments(tuple(self.changes))

    def changed(self, **values: Any) -> Record:
        """Return the record with other values."""
        return self.model_copy(update=values)


@dataclass(frozen=True)
class Before:
    """The record and the newest checkpoint of an earlier start of a run."""

    record: Record
    step: int
    """Step of the checkpoint from which the run resumes."""


def identity_of(
    context: RunContext, *, decay_steps: int, extension_digest: str | None, digests: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return all that the bits of a run depend on, flat: `{"optim.lr": 0.001, "data": "sha256:…", "world_size": 2, …}`.

    `digests` has further digests: of the files of an objective, and of the weights that the run began with. Under `elastic` the
    number of ranks is not part of the identity. `not_compared` names the values that count only on some devices.
    """
    config, group = context.config, context.group
    settings = flatten(config.model_dump(mode="json"))
    identity = {name: value for name, value in settings.items() if is_among(name, _IDENTITY)}
    identity |= flatten({"flags": flags()}) | {
        "schedule.decay_steps": decay_steps,
        "data": context.manifest.root_digest,
        "attention": context.backend,
        "extension": extension_digest,
        "threads": threads_per_rank(config),
        "device": device_name(group.device),
        "torch": torch.__version__,
        "nodes": group.num_nodes,
        "nccl": nccl_version() if group.device.type == "cuda" else None,
        **digests,
    }
    return identity if config.reproducibility == "elastic" else identity | {"world_size": group.world_size}


def check_data(run: Path, recorded: Mapping[str, Any], root_digest: str | None) -> None:
    """Raise ConfigError if the recorded identity of a run names other data."""
    if recorded.get("data") != root_digest:
        raise ConfigError(
            f"{run}: this run was trained on the data {recorded.get('data')}, not on {root_digest}; "
            "use another --run, or --data with the data that it was trained on"
        )


def check_identity(run: Path, recorded: Mapping[str, Any], identity: Mapping[str, Any], allow_changes: tuple[str, ...]) -> None:
    """Check that the identity of this start equals the recorded identity, except for the allowed changes.

    Raises:
        ConfigError: they differ; the message names the differences and the remedy.
    """
    check_data(run, recorded, identity.get("data"))
    changed = _differing(recorded, identity)
    refused = [one for one in changed if one.name not in allow_changes]
    names = [one.name for one in refused]
    allow = f"--resume.allow_changes {' '.join([*allow_changes, *names])}"
    if names == ["world_size"]:
        raise ConfigError(
            f"{run}: this run was started on {_ranks(recorded)}, but this start has {_ranks(identity)}, which add gradients in "
            f"another order. Use {recorded.get('world_size')} again. To resume with other results, add {allow}. "
            "A run that is started with --reproducibility elastic has the same bits on 1, 2, 4 or 8 ranks"
        )
    if names == ["schedule.decay_steps"]:
        raise ConfigError(
            f"{run}: its learning rate was planned to reach its floor at step {refused[0].recorded}, and is planned to do so at "
            f"step {refused[0].found} now. The learning-rate curve changes, so the results differ from those of an uninterrupted "
            f"run of that length. To train on with the new length, add {allow}. To keep the old length, use the old limits"
        )
    if refused:
        differences = ", ".join(f"{one.name} was {shown(one.recorded)} and is {shown(one.found)}" for one in refused)
        fixed = [one.name for one in refused if _is_fixed(one)]
        remedy = (
            f"The weights, optimizer state or average in its checkpoints do not fit another value of {' or '.join(fixed)}"
            if fixed
            else f"To resume with other results than those of an uninterrupted run, add {allow}"
        )
        raise ConfigError(
            f"{run}: this run was started with another configuration: {differences}. Use another --run, or the old values. {remedy}"
        )


def _is_fixed(difference: Difference) -> bool:
    """Return whether checkpoints do not fit the new value, so that no resume is possible."""
    return difference.name in markers_of(TrainConfig, FixesShapes) or (
        difference.name == "ema.decay" and difference.recorded is None
    )


def check_was_trained(run: Path, record: Record | None) -> None:
    """Raise ConfigError if a run holds an imported or compressed model, which has no steps to continue or to train again."""
    if record is not None and record.status in NEVER_TRAINED:
        raise ConfigError(
            f"{run}: its model is {record.status} and was not trained here, so it has no steps; begin a new run with its "
            f"weights: {command_text('train', '--init', run, '--run', 'NEW')}"
        )


def check_nothing_saved(run: Path, record: Record | None) -> None:
    """Check that no checkpoint of a run was lost. Without this check the run would start again and lose its history.

    A first save that was not completed does not count: before a second one begins, the first is on the device.

    Raises:
        CheckpointError: checkpoints were saved and are gone; the message names the last step and the remedy.
    """
    if record is None:
        return
    saved = {event.step for event in events_until(run / METRICS, CutOff(sys.maxsize)) if isinstance(event, SaveEvent)}
    if len(saved) > 1 or (saved and record.status in ("finished", "stopped")):
        raise CheckpointError(
            f"{run}: steps up to {max(saved)} were saved, and no checkpoint is there any more; put `checkpoints` back, "
            "or, to start again, use another --run or remove this folder"
        )


def _differing(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> list[Difference]:
    skipped = not_compared(recorded, identity)
    if all(one.get(f"guard.{rule}") == "log" for one in (recorded, identity) for rule in ("spike", "drop")):
        skipped |= {"guard.spike_factor", "guard.spike_floor"}  # they change no bit while spikes and drops are only logged
    skipped |= {
        name
        for name, value in _OLDER_DEFAULTS.items()
        if recorded.get(name) == value and identity.get(name) == _default_settings()[name]
    }
    return [one for one in find_differences(_with_newer_settings(recorded, identity), identity) if one.name not in skipped]


_OLDER_DEFAULTS = {"guard.spike_factor": 10.0}
"""A run that was started with an older default resumes with the new one."""


def _with_newer_settings(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded identity with the defaults of those settings of `identity` that did not exist when it was recorded."""
    newer = identity.keys() - recorded.keys()
    return {name: value for name, value in _default_settings().items() if name in newer} | dict(recorded)


@cache
def _default_settings() -> dict[str, Any]:
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in all_settings(TrainConfig) if name in _IDENTITY
    }
    return flatten(to_jsonable_python(defaults))


def _ranks(identity: Mapping[str, Any]) -> str:
    number = identity.get("world_size")
    return f"{number} rank{'s' * (number != 1)}"


def recorded_adjustments(
    run: Path, record: Record | None, identity: Mapping[str, Any], allow_changes: tuple[str, ...]
) -> Adjustments:
    """Return the adjustments of an earlier start of the run, and those that a rank noted just before it ended.

    If the identity differs otherwise than allowed, there are none. `batch.micro` among the allowed changes drops smaller
    micro-batches, `quarantine` drops the list of shards that were left out, and `cooldown` drops the cool-down and the end that
    belongs to it.
    """
    if record is None or any(one.name not in allow_changes for one in _differing(record.identity, identity)):
        return Adjustments()
    adjustments = record.adjustments.plus(*_notes(run))
    names = {"micro": "batch.micro", "quarantine": "quarantine", "cooldown": "cooldown"}
    return adjustments.of(kind for kind, name in names.items() if name not in allow_changes)


def note_adjustment(run: Path, adjustment: Adjustment) -> None:
    """Add an adjustment to the record, durably."""
    record = read_record(run)
    write_record(run, record.changed(changes=[*record.changes, adjustment]))


def note_trained_weights(run: Path, trained: int, total: int) -> None:
    """Write into the record how many weights the run trains, and how many the model has. Runs that train all do not say so."""
    write_record(run, read_record(run).changed(trained_weights=trained, total_weights=total))


def leave_note(run: Path, adjustment: Adjustment, rank: int) -> None:
    """Note an adjustment for the next start of the run, durably. Any rank can do so, without communication."""
    write_atomic(run / f"change-{rank}.json", json.dumps(Adjustments((adjustment,)).to_json()).encode())


def _notes(run: Path) -> list[Adjustment]:
    adjustments: list[Adjustment] = []
    for path in sorted(run.glob("change-*.json")):
        data = read_run_file(path, MAX_NOTE_BYTES, run)
        try:
            adjustments += Adjustments.from_json(parse_json(data)).made
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: {error}; no rank wrote this file: restore it from a copy, or remove it") from None
    return adjustments


def open_record(
    context: RunContext,
    identity: Mapping[str, Any],
    extension: bytes | None,
    adjustments: Adjustments,
    before: Before | None,
    precision: ChosenPrecision,
    of_objective: Mapping[str, bytes] = MappingProxyType({}),
    initial: Origin | None = None,
) -> None:
    """Write `config.toml`, the tokenizer, the extension's source and `record.json` of a run that starts or resumes.

    `of_objective` has the files of the objective by name, which the folder `objective` keeps.

    A run that resumes from `before` logs how identity, environment and settings differ from those of the start before.
    """
    run, config, manifest = context.config.run, context.config, context.manifest
    settings = to_toml("train", redacted_settings(config.model_dump(mode="json")))
    environment = environment_facts() | {"world_size": context.group.world_size}
    earlier, differences = ([], ()) if before is None else _since_before(run, before, identity, environment, settings)
    write_atomic(run / "config.toml", settings.encode())
    # A start that left no checkpoint may have had another tokenizer.
    if _contents(run / "tokenizer") != _contents(config.data / "tokenizer", PreparedDataError):
        for left in filter(is_unfinished, run.glob(".tokenizer.*")):
            shutil.rmtree(left, ignore_errors=True)
        temporary = unfinished_path(run / "tokenizer")
        _copy_files(config.data / "tokenizer", temporary, below=config.data)
        shutil.rmtree(run / "tokenizer", ignore_errors=True)
        commit_directory(temporary, run / "tokenizer")
    if extension is not None:
        write_atomic(run / "extension.py", extension)
    else:
        (run / "extension.py").unlink(missing_ok=True)
    if of_objective:
        own_folder(run / "objective")
    for name, data in of_objective.items():
        write_atomic(run / "objective" / name, data)
    tokenizer = sorted(path.relative_to(run).as_posix() for path in (run / "tokenizer").iterdir())
    names = [
        "config.toml",
        *tokenizer,
        *(f"objective/{name}" for name in of_objective),
        *(["extension.py"] if extension is not None else []),
    ]
    record = Record.model_validate(
        {
            "format": 1,
            "status": "training",
            "identity": dict(identity),
            "changes": list(adjustments.made),
            "precision": asdict(precision),
            "data": {"root_digest": manifest.root_digest, "tokenizer_digest": manifest.tokenizer_digest},
            "environment": environment,
            "earlier": earlier,
            "files": _digests(run, names),
        }
    )
    if initial is not None:
        record = record.changed(initial=initial)
    if before is not None and before.record.origin is not None:
        record = record.changed(origin=before.record.origin)
    write_record(run, record)
    for path in run.glob("change-*.json"):  # the record holds them now
        path.unlink()
    if before is not None and differences:
        lines = "".join(f"\n  {one.describe()}" for one in differences)
        level = logging.WARNING if any(one.changes_bits for one in differences) else logging.INFO
        _log.log(
            level, "resumed at step %s with differences from the previous start (* can change the results):%s", before.step, lines
        )


def _since_before(
    run: Path, last: Before, identity: Mapping[str, Any], environment: Mapping[str, Any], settings: str
) -> tuple[list[Earlier], tuple[Difference, ...]]:
    """Return `earlier` of the record, and the differences of this start from the last one."""
    record, step = last.record, last.step
    skipped = not_compared(record.identity, identity)
    before, now = same_facts(record.environment.to_json(), environment)
    known = _with_newer_settings(record.identity, identity)
    before |= {name: value for name, value in known.items() if name not in skipped}
    now |= {name: value for name, value in identity.items() if name not in skipped}
    earlier = [one.model_copy(update={"until": min(one.until, step)}) for one in record.earlier]
    deciding = record.identity.keys() | identity.keys()
    if was := {one.name: one.recorded for one in find_differences(before, now)}:
        earlier.append(Earlier(until=step, was=was))
    with suppress(OSError, ValueError, KeyError, CheckpointError):  # a damaged file of settings is written again
        before = _reported_settings(read_run_file(run / "config.toml", MAX_SETTINGS_BYTES, run)) | before
        now = _reported_settings(settings.encode()) | now
    return earlier, find_differences(before, now, deciding)


def _reported_settings(toml: bytes) -> dict[str, Any]:
    """Return settings by their full names, without paths and without settings for one start."""
    settings = parse_toml(toml)["train"]
    if not isinstance(settings, dict):
        raise ValueError("train is no table of settings")
    settings = flatten(redacted_settings(settings))  # an older version stored secrets
    return {name: value for name, value in settings.items() if name not in _UNREPORTED}


def _copy_files(source: Path, target: Path, *, below: Path) -> None:
    """Create a folder with copies of the files in another one.

    Raises:
        PreparedDataError: one is a link or no regular file.
    """
    target.mkdir()
    for path in sorted(source.iterdir()):
        try:
            with open_input(path, below=below) as file, (target / path.name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
        except UnusableFileError as error:
            raise PreparedDataError(f"{error}; run `prepare` again") from None


def _contents(folder: Path, error: type[ProjectError] = CheckpointError) -> dict[str, str]:
    """Return the digests of the files in a folder, by name; empty if there is no folder. Raises `error` for an irregular file."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise error(f"{folder} is a link or a file, and a directory is needed there; remove it, or use another run")
    try:
        return {path.name: digest_run_file(folder, path.name) for path in folder.iterdir()} if folder.exists() else {}
    except CheckpointError as found:
        raise error(str(found)) from None


def complete_record(
    run: Path, *, status: str, ended_by: str | None, step: int, weights_digest: str | None, alerts: Mapping[str, int]
) -> None:
    """Record how the run ended, the number of alerts of each rule, and the digests of the files that it has written.

    Called when nothing more will be written. `ended_by` is the limit that was reached, why evaluations ended the run, the source of
    a stop request, or the error. After an error there is no digest of the weights.
    """
    record = read_record(run)
    checkpoints = CheckpointStore(run / "checkpoints")
    manifests = [checkpoints.manifest_path(saved).relative_to(run).as_posix() for saved in checkpoints.steps()]
    written = [name for name in (METRICS, LEDGER.as_posix(), *manifests) if (run / name).exists()]
    files = record.files | _digests(run, written)
    for name in {METRICS, LEDGER.as_posix()}.intersection(written):  # some of their lines are newer than the last checkpoint
        with open_input(run / name, below=run) as file:
            os.fsync(file.fileno())
    ended = record.changed(files=files, status=status, ended_by=ended_by, step=step, weights=weights_digest, alerts=dict(alerts))
    write_record(run, ended)


def read_record_if_any(run: Path) -> Record | None:
    """Return the record of a run, None if there is no run. Raises as `read_record` does."""
    return read_record(run) if (run / RECORD).exists() else None


def read_record(run: Path) -> Record:
    """Return the record of a run.

    Raises:
        CheckpointError: there is none, or it was changed.
    """
    path = run / RECORD
    try:
        found = unsealed(read_run_file(path, MAX_RECORD_BYTES, run))
    except FileNotFoundError:
        raise CheckpointError(not_a_run(run, RECORD)) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: the file was changed ({error}); restore it from a copy") from None
    try:
        return parsed(Record, found)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; the file was changed: restore it from a copy") from None


def write_record(run: Path, record: Record) -> None:
    """Replace the record of a run, durably."""
    write_atomic(run / RECORD, sealed(record.to_json()))


def recorded_micro(run: Path, record: Record | None) -> int | None:
    """Return the rows of a micro-batch with which a run was started, None if there is no run.

    Raises:
        CheckpointError: the record holds a value that this program does not write.
    """
    if record is None:
        return None
    micro = record.identity.get("batch.micro")
    if micro is None:
        return None
    if type(micro) is not int or not 1 <= micro <= _MAX_MICRO:
        raise CheckpointError(
            f"{run / RECORD}: identity has batch.micro = {micro!r}, but a number from 1 to {_MAX_MICRO} was expected; "
            "restore it from a copy"
        )
    return micro


def recorded_precision(run: Path, record: Record | None) -> Precision | None:
    """Return the number format with which a run was started, None if there is no run.

    Raises:
        CheckpointError: the record holds a value that this program does not write.
    """
    if record is None:
        return None
    found = record.identity.get("precision")
    if found not in get_args(Precision):
        raise CheckpointError(
            f"{run / RECORD}: identity has precision = {found!r}, but one of {', '.join(get_args(Precision))} was expected; "
            "restore it from a copy"
        )
    return cast("Precision", found)


def _digests(run: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: digest_run_file(run, name) for name in names}
