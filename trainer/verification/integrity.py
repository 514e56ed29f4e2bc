"""Reads every file of a run and of its data, and compares the files with their digests and with each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.errors import CheckpointError, PreparedDataError
from common.untrusted import digest_run_file
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import check_digests, read_manifest
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.weights import weights_digest
from trainer.extensions.trust import EXTENSION, recorded_source
from trainer.runs.events import TrainEvent
from trainer.runs.layout import CHECKPOINTS, LEDGER, METRICS, RECORD, foreign_files
from trainer.runs.ledger import LedgerStep, read_ledger
from trainer.runs.metrics_file import read_events
from trainer.runs.record import Origin
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import audit_run
from trainer.verification.auditor import AuditReport

_CHECKED_BY_CONTENT = (METRICS, LEDGER.as_posix(), f"{CHECKPOINTS}/")  # that gives a better message than a digest


@dataclass(frozen=True)
class Integrity:
    status: str
    files: int
    checkpoints: list[int]
    foreign: list[str]  # files that do not belong to the run. None of them is used.


@dataclass(frozen=True)
class TrainedIntegrity(Integrity):
    data_files: int
    quarantined: list[str]
    events: int
    ledger_lines: int
    origin: Origin | None
    initial: Origin | None


def check_integrity(run: SavedRun, data: Path | None = None) -> TrainedIntegrity:
    path, record = run.path, run.record
    foreign = foreign_files(path, record.files)
    if recorded_source(path, record.identity.get("extension")) is None and EXTENSION in foreign:
        raise CheckpointError(
            f"{path / EXTENSION}: the record names no extension, so this code is not the run's and is never executed; remove it"
        )
    for name, digest in record.files.items():
        if not name.startswith(_CHECKED_BY_CONTENT):
            _check_file(path, name, digest)
    store = CheckpointStore.of(path)
    for step in store.steps():
        store.verify(step)
    origin, initial = record.origin, record.initial
    if origin is not None and origin.step in store.steps():
        found = weights_digest(store.load(origin.step).model)
        if found != origin.weights:
            raise CheckpointError(
                f"{path}: the weights of step {origin.step} are not those of the run that it branches off: their digest is "
                f"{found}, but the record says {origin.weights}; restore the checkpoint from a copy"
            )
    if initial is not None and record.identity.get("init") != initial.weights:
        raise CheckpointError(f"{path / RECORD}: identity and `initial` name different weights; restore it from a copy")
    lost = {shard for one in record.changes for shard in one.shards}
    directory = run.data_folder(data)
    with reading(directory, f"verify of run {path.absolute().name}"):
        manifest = read_manifest(directory)
        if manifest.root_digest != record.data.root_digest:
            raise PreparedDataError(
                f"{directory}: its root digest is {manifest.root_digest}, but the run was trained on {record.data.root_digest}; "
                "name the right folder with --data"
            )
        digests = {name: digest for name, digest in manifest.digests.items() if name not in lost}
        check_digests(directory, digests, manifest.sizes)
    report = audit_run(path, data)
    num_events = _check_metrics(path, report)
    for name, digest in record.files.items():
        _check_file(path, name, digest)
    return TrainedIntegrity(
        record.status,
        len(record.files),
        store.steps(),
        foreign,
        len(digests),
        sorted(lost),
        num_events,
        report.lines,
        origin,
        initial,
    )


def check_untrained(run: SavedRun) -> Integrity:
    path, record = run.path, run.record
    for name, digest in record.files.items():
        _check_file(path, name, digest)
    found = weights_digest(CheckpointStore.of(path).load(0).model)
    if found != record.weights:
        raise CheckpointError(
            f"{path}: the digest of the weights is {found}, but the record says {record.weights}; restore the run from a copy"
        )
    return Integrity(record.status, len(record.files), [0], foreign_files(path, record.files))


def _check_file(run: Path, name: str, expected: str) -> None:
    path = run / name
    try:
        found = digest_run_file(run, name)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, but the record names it; restore it from a copy") from None
    if found != expected:
        raise CheckpointError(
            f"{path}: its digest is {found}, but the record says {expected}; the file was changed: restore it from a copy"
        )


def _check_metrics(run: Path, report: AuditReport) -> int:
    """Compare the metrics with the ledger, which the audit has checked. Return the number of events."""
    targets, total = {0: 0}, 0
    for entry in read_ledger(run / LEDGER):
        if isinstance(entry, LedgerStep):
            total += entry.targets
            targets[entry.head.step] = total
    num_events = last = 0
    for event in read_events(run / METRICS):
        num_events, last = num_events + 1, event.step
        if isinstance(event, TrainEvent) and event.targets != targets.get(last, event.targets):
            raise CheckpointError(
                f"{run / METRICS}: {event.targets} tokens up to step {last}, but the ledger has {targets[last]}; "
                "one of them was changed, restore it from a copy"
            )
    if last < report.steps:
        raise CheckpointError(
            f"{run / METRICS}: it ends at step {last}, but the ledger at step {report.steps}; restore it from a copy"
        )
    return num_events
