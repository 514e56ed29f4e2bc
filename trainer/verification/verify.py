"""The levels of `verify`. Each level includes the levels before it.

integrity     every file of run and data is unchanged, and the files agree with each other
environment   lists what differs between this machine with its software and those of the run
data          the sources, prepared again, give the same bytes
replay        steps, trained again, give the same bits
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.text import some_of
from common.untrusted import digest_run_file
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import check_digests, read_manifest
from trainer.checkpoint import CheckpointStore
from trainer.checkpoint.weights import weights_digest
from trainer.config import TrainConfig
from trainer.distributed.group import joined_group
from trainer.extensions.trust import EXTENSION, recorded_source
from trainer.machine.determinism import configure_determinism, device_name, flags, not_compared, threads_per_rank
from trainer.machine.environment import Difference, environment_facts, find_differences, same_facts
from trainer.machine.locks import describe_unlocked
from trainer.machine.settings import settings_here
from trainer.model.attention import backend_of
from trainer.runs.events import TrainEvent
from trainer.runs.layout import foreign_files
from trainer.runs.ledger import LEDGER, LedgerStep, read_ledger
from trainer.runs.metrics_file import METRICS, read_events
from trainer.runs.record import NEVER_TRAINED, Earlier, Origin, check_was_trained, read_record
from trainer.runs.saved_run import data_folder, load_config
from trainer.verification.audit import audit_run
from trainer.verification.auditor import AuditReport
from trainer.verification.data_check import prepare_again
from trainer.verification.outcome import LEVELS, Outcome
from trainer.verification.replay import Train, replay_run

__all__ = ["check_integrity", "compare_environment", "verify_run"]

_IN_IDENTITY = ("device", "torch", "attention", "nccl", "nodes", "flags.")
"""Differences that a resume refuses, without the number of threads: a replay uses the recorded number."""
_NAMED_FILES = 20


def verify_run(
    run: Path,
    *,
    train: Train,
    level: str = "environment",
    num_steps: int | None = None,
    start: int | None = None,
    data: Path | None = None,
    sources: Sequence[str] = (),
    trust_code: bool = False,
) -> Iterator[Outcome]:
    """Check a run level by level, and yield the result of each level. The first failure is raised.

    Args:
        run: the run's directory.
        train: trains the steps of a replay: see `replay_run`.
        level: the highest level, one of `LEVELS`.
        num_steps: steps to train again at any level. None at the level `replay`: 10, or all steps if the run has fewer.
        start: the step to begin the replay from, None to choose one.
        data: the new directory of the prepared data, if it was moved.
        sources: the sources of the data: paths, or `name=path` for a source that a recipe names.
        trust_code: allow a replay to execute code from the run's directory: see `trainer.extensions.trust`.

    Raises:
        PreparedDataError: the data is missing or damaged, or prepared again it is not the same.
        CheckpointError: a file of the run is missing or damaged, or the replay has other bits.
        ConfigError: see `replay_run`.
    """
    levels = LEVELS[: LEVELS.index(level) + 1]
    if read_record(run).status in NEVER_TRAINED:
        if num_steps or levels[-1] in ("data", "replay"):
            check_was_trained(run, read_record(run))
        yield _check_untrained(run)
        return
    yield check_integrity(run, data)
    here = environment_facts() if len(levels) > 1 or num_steps else {}
    differences = compare_environment(run, here) if here else ()
    earlier = read_record(run).earlier
    if "environment" in levels:
        facts = {"differences": [asdict(one) for one in differences], "unlocked": here["unlocked"], "earlier": earlier}
        unlocked = describe_unlocked(here["lock"], here["unlocked"])
        lines = [_environment_text(differences), *_indented(unlocked), *map(_earlier_text, earlier)]
        yield Outcome("environment", "\n".join(lines), facts)
    if "data" in levels:
        directory = data_folder(run, data)
        yield prepare_again(directory, read_manifest(directory), sources)
    if "replay" in levels or num_steps:
        changed = tuple(one.name for one in differences if one.name.startswith(_IN_IDENTITY))
        replay = replay_run(run, num_steps, train=train, start=start, data=data, allow_changes=changed, trust_code=trust_code)
        if replay.difference:
            because = f"; the environment differs in {', '.join(changed)}" if changed else ""
            others = [f"\n{_earlier_text(one)}" for one in earlier if one.until > replay.start]
            raise CheckpointError(f"{run}: {replay.difference}{because}{''.join(others)}")
        yield Outcome("replay", replay.describe(), asdict(replay))


def check_integrity(run: Path, data: Path | None = None) -> Outcome:
    """Read and check every file of a run and of its data, and list the other files in the run's directory.

    Raises:
        PreparedDataError, CheckpointError: a file is missing or was changed, or code is there that the record does not name.
    """
    record = read_record(run)
    foreign = foreign_files(run, record.files)
    if recorded_source(run, record.identity.get("extension")) is None and EXTENSION in foreign:
        raise CheckpointError(
            f"{run / EXTENSION}: the record names no extension, so this code is not the run's and is never executed; remove it"
        )
    written_last = (METRICS, LEDGER.as_posix(), "checkpoints/")  # a check of their content gives a better message than a digest
    for name, digest in record.files.items():
        if not name.startswith(written_last):
            _check_file(run, name, digest)
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        store.verify(step)
    origin = record.origin
    if origin is not None and origin.step in store.steps():
        _check_origin(run, store, origin)
    initial = record.initial
    if initial is not None and record.identity.get("init") != initial.weights:
        raise CheckpointError(f"{run / 'record.json'}: identity and `initial` name different weights; restore it from a copy")
    lost = {shard for one in record.changes for shard in one.shards}
    directory = data_folder(run, data)
    with reading(directory, f"verify of run {run.absolute().name}"):
        num_files = _check_data(directory, record.data.root_digest, lost)
    report = audit_run(run, data)
    num_events = _check_metrics(run, report)
    for name, digest in record.files.items():
        _check_file(run, name, digest)
    facts = {
        "status": record.status,
        "files": len(record.files),
        "checkpoints": store.steps(),
        "data_files": num_files,
        "quarantined": sorted(lost),
        "events": num_events,
        "ledger_lines": report.lines,
        "foreign": foreign,
        "origin": None if origin is None else origin.to_json(),
        "initial": None if initial is None else initial.to_json(),
    }
    text = (
        f"integrity    {len(record.files)} files of the run, checkpoints {', '.join(map(str, store.steps())) or 'none'}, "
        f"{report.lines} ledger lines, {num_events} events of metrics and {num_files} files of the data are unchanged"
        + (f"; not checked, because the run left them out: {', '.join(sorted(lost))}" if lost else "")
        + ("" if origin is None else f"\n  the run branches off another run at step {origin.step}: `origin` in record.json")
        + (
            ""
            if initial is None
            else f"\n  the run began with weights of another run: `initial` in record.json, step {initial.step}"
        )
        + _foreign_text(foreign)
    )
    return Outcome("integrity", text, facts)


def _check_untrained(run: Path) -> Outcome:
    """Read and check every file of an imported or compressed model."""
    record, store = read_record(run), CheckpointStore(run / "checkpoints")
    for name, digest in record.files.items():
        _check_file(run, name, digest)
    found = weights_digest(store.load(0).model)
    if found != record.weights:
        raise CheckpointError(
            f"{run}: the digest of the weights is {found}, but the record says {record.weights}; restore the run from a copy"
        )
    foreign = foreign_files(run, record.files)
    status = record.status
    facts = {"status": status, "files": len(record.files), "checkpoints": [0], "foreign": foreign}
    text = f"integrity    {len(record.files)} files and the weights of the {status} model are unchanged{_foreign_text(foreign)}"
    return Outcome("integrity", text, facts)


def _check_origin(run: Path, store: CheckpointStore, origin: Origin) -> None:
    found = weights_digest(store.load(origin.step).model)
    if found != origin.weights:
        raise CheckpointError(
            f"{run}: the weights of step {origin.step} are not those of the run that it branches off: their digest is {found}, "
            f"but the record says {origin.weights}; restore the checkpoint from a copy"
        )


def _foreign_text(foreign: Sequence[str]) -> str:
    """Return the first names. Characters that a terminal would not print become escapes."""
    names = some_of([name if name.isprintable() else ascii(name) for name in foreign], _NAMED_FILES)
    return f"\n  files that do not belong to this run, and are not used: {names}" if foreign else ""


def compare_environment(run: Path, facts: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return the differences between the environment of this process and that of the run.

    Args:
        run: the run's directory.
        facts: `environment_facts()` of this process.

    Raises:
        CheckpointError: the record is missing or damaged.
        ConfigError: this machine has GPUs, but torch sees none.
    """
    record, config = read_record(run), load_config(run)
    here = settings_here(config)
    with suppress(ConfigError):  # the settings that it refuses appear among the flags below
        configure_determinism(here)
    identity = record.identity
    recorded, found = same_facts(record.environment.to_json(), facts)
    recorded |= {name: identity.get(name) for name in ("device", "threads", "attention")}
    decided = [name for name in identity if name == "nodes" or name.startswith("flags.")]
    recorded |= {name: identity[name] for name in decided}
    found |= _machine(config) | {f"flags.{name}": value for name, value in flags().items()}
    found |= {"nodes": 1} if "nodes" in identity else {}
    recorded.pop("world_size", None)  # a replay uses the same number
    without_effect = not_compared(identity, found | {name: identity.get(name) for name in ("reproducibility", "world_size")})
    differences = find_differences(recorded, found)
    return tuple(replace(one, changes_bits=one.changes_bits and one.name not in without_effect) for one in differences)


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


def _check_data(directory: Path, root_digest: str, lost: Collection[str]) -> int:
    """Check all files of the prepared data except the shards in quarantine. Return the number of checked files."""
    manifest = read_manifest(directory)
    if manifest.root_digest != root_digest:
        raise PreparedDataError(
            f"{directory}: its root digest is {manifest.root_digest}, but the run was trained on {root_digest}; "
            "name the right folder with --data"
        )
    digests = {name: digest for name, digest in manifest.digests.items() if name not in lost}
    check_digests(directory, digests, manifest.sizes)
    return len(digests)


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


def _machine(config: TrainConfig) -> dict[str, Any]:
    """Return the parts of a run's identity that this machine decides."""
    try:
        with joined_group(config.device) as group:
            backend = backend_of(config, group.device)
            return {"device": device_name(group.device), "threads": threads_per_rank(config), "attention": backend}
    except ConfigError as error:
        return {"device": str(error), "threads": threads_per_rank(config), "attention": None}


def _environment_text(differences: Sequence[Difference]) -> str:
    if not differences:
        return "environment  as recorded"
    marked = sum(one.changes_bits for one in differences)
    head = f"environment  {len(differences)} difference{'s' * (len(differences) > 1)}, of which {marked} can change the results (*)"
    return "\n".join([head, *(f"  {one.describe()}" for one in differences)])


def _indented(line: str) -> list[str]:
    return [f"  {line}"] if line else []


def _earlier_text(earlier: Earlier) -> str:
    return f"  up to step {earlier.until} the run had another {', '.join(earlier.was)} (`earlier` in record.json)"
