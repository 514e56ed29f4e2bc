"""The levels of `verify`, which docs/training.md lists. Each level includes the levels before it.

They compare every file of a run and of its data with digests and with each other, and its data with the same preparation again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError, PreparedDataError
from common.paths import ROOT
from common.settings.dotted import to_toml
from common.text import some_of
from common.untrusted import digest_run_file
from data_pipeline.dataset.locks import reading
from data_pipeline.dataset.manifest import Manifest, check_digests, read_manifest
from trainer.checkpoint.of_run import weights_digest
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.group import joined_group
from trainer.extensions.trust import recorded_files
from trainer.machine.determinism import configure_determinism, device_name, flags, not_compared, settings_here, threads_per_rank
from trainer.machine.environment import ChangedFact, describe_unlocked, environment_facts, find_differences, same_facts
from trainer.model.attention import backend_of
from trainer.model.forward import own_kernels
from trainer.runs.events import TrainEvent
from trainer.runs.layout import CHECKPOINTS, LEDGER, METRICS, RECORD, foreign_files, is_extension
from trainer.runs.ledger import LedgerStep, read_ledger
from trainer.runs.metrics_file import read_events
from trainer.runs.record import NEVER_TRAINED, Earlier, Origin, check_was_trained
from trainer.runs.saved_run import SavedRun
from trainer.verification.audit import AuditReport, audit_run
from trainer.verification.replay import Train, replay_run, run_tied

LEVELS = ("integrity", "environment", "data", "replay")
# Without threads: a replay uses the recorded number.
_IN_IDENTITY = ("device", "torch", "attention", "kernels", "nccl", "nodes", "optimizer", "flags.")
_NAMED_FILES = 20
_CHECKED_BY_CONTENT = (METRICS, LEDGER.as_posix(), f"{CHECKPOINTS}/")  # that gives a better message than a digest


@dataclass(frozen=True)
class Outcome:
    level: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


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
    if recorded_files(path, record.identity.get("extension")) is None and (code := [*filter(is_extension, foreign)]):
        raise CheckpointError(
            f"{path / code[0]}: the record names no extension, so this code is not the run's and is never executed; remove it"
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


def prepare_again(directory: Path, manifest: Manifest, sources: Sequence[str]) -> Outcome:
    """Prepare the data again, and compare the root digests. A manifest has no paths, so users name all but the built-in sources."""
    if not sources and manifest.is_builtin:
        sources = ("builtin",)
    if reason := _not_preparable(manifest, sources):
        return Outcome("data", f"data         not prepared again: {reason}", {"prepared_again": False, "reason": reason})
    with tempfile.TemporaryDirectory(prefix="prepared-again-") as name:
        output, recipe = Path(name) / "data", Path(name) / "recipe.toml"
        recipe.write_text(to_toml("prepare", recipe_of(manifest, sources)), encoding="utf-8")
        plain = [source for source in sources if "=" not in source]
        command = [sys.executable, "-P", "-m", "data_pipeline", "prepare", "--recipe", str(recipe), "--output", str(output)]
        done = run_tied(
            [*command, *(["--sources", *plain] if plain else [])],
            cwd=Path.cwd(),
            env={name: value for name, value in os.environ.items() if not name.startswith("PREP_")} | {"PYTHONPATH": str(ROOT)},
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")] or done.stderr.splitlines()[-1:]
            raise PreparedDataError(f"{directory}: its sources cannot be prepared again: {' '.join(errors)}")
        again = read_manifest(output)
    if again.root_digest != manifest.root_digest:
        raise PreparedDataError(
            f"{directory}: prepared again, its root digest is {again.root_digest}, not {manifest.root_digest}; "
            f"{difference_of_manifests(manifest, again)}"
        )
    return Outcome("data", f"data         prepared again, with the same root digest {again.root_digest}", {"prepared_again": True})


def _not_preparable(manifest: Manifest, sources: Sequence[str]) -> str:
    """Return why the data cannot be prepared again, an empty string if it can."""
    if not manifest.config:
        return "its manifest holds no settings"
    if files := manifest.named_files:
        return f"{', '.join(files)} named files, and the manifest has only their digests; prepare again yourself and compare"
    named = {source.partition("=")[0] for source in sources if "=" in source}
    if missing := [name for name in manifest.shaping["source"] if name not in named]:
        return f"the location of source{'s' * (len(missing) > 1)} {', '.join(missing)} is not known; give --sources NAME=PATH"
    if not sources:
        return f"the location of sources {', '.join(manifest.sources)} is not known; give --sources PATH …"
    return ""


def recipe_of(manifest: Manifest, sources: Sequence[str]) -> dict[str, Any]:
    """Return the settings that change bytes, and the sources. A manifest is untrusted: no other field may decide about files."""
    settings = _none_words(manifest.shaping)
    for source in sources:
        name, separator, path = source.partition("=")
        if separator:
            if name not in settings["source"]:
                raise ConfigError(f"--sources {source}: the data has the sources {', '.join(manifest.sources)}, and no {name}")
            settings["source"][name].setdefault("paths", []).append(path)
    return settings


def _none_words(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _none_words(value) if isinstance(value, dict) else "none" if value is None else value
        for name, value in values.items()
    }


def difference_of_manifests(recorded: Manifest, again: Manifest) -> str:
    """Return the most useful difference of two manifests: the first input that differs, else the first shard."""
    parts = [
        ({f"{one['source']}/{one['path']}": one for one in found.inputs}, {one.path: one for one in found.shards})
        for found in (recorded, again)
    ]
    for kind, ours, theirs in zip(("inputs", "shards"), *parts, strict=True):
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                change = "is new" if name not in ours else "is missing" if name not in theirs else "has different content"
                return f"the first of the {kind} that differs: {name} {change}"
    return "settings, program or versions differ"


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
    """Check a run level by level up to `level`, and yield the result of each. The first failure is raised.

    `num_steps` and `start` are those of `replay_run`, at any level. `data` is the new directory of the data, if it was moved.
    `sources` are paths, or `name=path` for a source that a recipe names.
    """
    levels, saved = LEVELS[: LEVELS.index(level) + 1], SavedRun(run)
    if saved.record.status in NEVER_TRAINED:
        if num_steps or levels[-1] in ("data", "replay"):
            check_was_trained(run, saved.record)
        yield _integrity_outcome(check_untrained(saved))
        return
    yield _integrity_outcome(check_integrity(saved, data))
    here = environment_facts() if len(levels) > 1 or num_steps else {}
    differences = compare_environment(saved, here) if here else ()
    earlier = saved.record.earlier
    if "environment" in levels:
        facts = {"differences": [asdict(one) for one in differences], "unlocked": here["unlocked"]}
        facts["earlier"] = [one.to_json() for one in earlier]
        num, marked = len(differences), sum(one.changes_bits for one in differences)
        found = f"{num} difference{'s' * (num > 1)}, of which {marked} can change the results (*)" if num else "as recorded"
        unlocked = describe_unlocked(here["lock"], here["unlocked"])
        lines = [f"environment  {found}", *(f"  {one.describe()}" for one in differences)]
        lines += [*([f"  {unlocked}"] if unlocked else []), *map(_earlier_text, earlier)]
        yield Outcome("environment", "\n".join(lines), facts)
    if "data" in levels:
        directory = saved.data_folder(data)
        yield prepare_again(directory, read_manifest(directory), sources)
    if "replay" in levels or num_steps:
        changed = tuple(one.name for one in differences if one.name.startswith(_IN_IDENTITY))
        replay = replay_run(run, num_steps, train=train, start=start, data=data, allow_changes=changed, trust_code=trust_code)
        if replay.difference:
            because = f"; the environment differs in {', '.join(changed)}" if changed else ""
            others = [f"\n{_earlier_text(one)}" for one in earlier if one.until > replay.start]
            raise CheckpointError(f"{run}: {replay.difference}{because}{''.join(others)}")
        yield Outcome("replay", replay.describe(), asdict(replay))


def compare_environment(run: SavedRun, facts: Mapping[str, Any]) -> tuple[ChangedFact, ...]:
    record, config = run.record, run.config
    here = settings_here(config)
    with suppress(ConfigError):  # the settings that it refuses appear among the flags below
        configure_determinism(here)
    identity = record.identity
    recorded, found = same_facts(record.environment.to_json(), facts)
    recorded |= {name: identity.get(name) for name in ("device", "threads", "attention", "kernels")}
    decided = [name for name in identity if name == "nodes" or name.startswith("flags.")]
    recorded |= {name: identity[name] for name in decided}
    threads = threads_per_rank(config)
    try:
        with joined_group(config.device) as group:
            found |= {"device": device_name(group.device), "threads": threads, "attention": backend_of(config, group.device)}
            found["kernels"] = own_kernels(config, group.device)
    except ConfigError as error:
        found |= {"device": str(error), "threads": threads, "attention": None}
    found |= {f"flags.{name}": value for name, value in flags().items()}
    found |= {"nodes": 1} if "nodes" in identity else {}
    recorded["optimizer"], found["optimizer"] = identity.get("optimizer"), config.optim.optimizer.bits
    recorded.pop("world_size", None)  # a replay uses the same number
    without_effect = not_compared(identity, found | {name: identity.get(name) for name in ("reproducibility", "world_size")})
    differences = find_differences(recorded, found)
    return tuple(replace(one, changes_bits=one.changes_bits and one.name not in without_effect) for one in differences)


def _integrity_outcome(found: Integrity) -> Outcome:
    facts: dict[str, Any] = dict(vars(found))
    for name in ("origin", "initial"):
        if isinstance(origin := facts.get(name), Origin):
            facts[name] = origin.to_json()
    text = f"integrity    {found.files} files and the weights of the {found.status} model are unchanged"
    if isinstance(found, TrainedIntegrity):
        text = (
            f"integrity    {found.files} files of the run, checkpoints {', '.join(map(str, found.checkpoints)) or 'none'}, "
            f"{found.ledger_lines} ledger lines, {found.events} events of metrics and {found.data_files} files of the data are "
            "unchanged"
        )
        if found.quarantined:
            text += f"; not checked, because the run left them out: {', '.join(found.quarantined)}"
        if found.origin is not None:
            text += f"\n  the run branches off another run at step {found.origin.step}: `origin` in record.json"
        if found.initial is not None:
            text += f"\n  the run began with weights of another run: `initial` in record.json, step {found.initial.step}"
    if found.foreign:
        names = [name if name.isprintable() else ascii(name) for name in found.foreign]  # a terminal would act on some characters
        text += f"\n  files that do not belong to this run, and are not used: {some_of(names, _NAMED_FILES)}"
    return Outcome("integrity", text, facts)


def _earlier_text(earlier: Earlier) -> str:
    return f"  up to step {earlier.until} the run had another {', '.join(earlier.was)} (`earlier` in record.json)"
