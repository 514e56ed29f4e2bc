"""The levels of `verify`. Each level includes the levels before it.

integrity     every file of run and data is unchanged, and the files agree with each other
environment   lists what differs between this machine with its software and those of the run
data          the sources, prepared again, give the same bytes
replay        steps, trained again, give the same bits
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.text import some_of
from data_pipeline.dataset.manifest import read_manifest
from trainer.machine.environment import ChangedFact, describe_unlocked, environment_facts
from trainer.runs.record import NEVER_TRAINED, Earlier, Origin, check_was_trained
from trainer.runs.saved_run import SavedRun
from trainer.verification.data_check import prepare_again
from trainer.verification.environment import compare_environment
from trainer.verification.integrity import Integrity, TrainedIntegrity, check_integrity, check_untrained
from trainer.verification.outcome import LEVELS, Outcome
from trainer.verification.replay import Train, replay_run

_IN_IDENTITY = ("device", "torch", "attention", "nccl", "nodes", "flags.")  # without threads: a replay uses the recorded number
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
        unlocked = describe_unlocked(here["lock"], here["unlocked"])
        lines = [_environment_text(differences), *([f"  {unlocked}"] if unlocked else []), *map(_earlier_text, earlier)]
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


def _environment_text(differences: Sequence[ChangedFact]) -> str:
    if not differences:
        return "environment  as recorded"
    marked = sum(one.changes_bits for one in differences)
    head = f"environment  {len(differences)} difference{'s' * (len(differences) > 1)}, of which {marked} can change the results (*)"
    return "\n".join([head, *(f"  {one.describe()}" for one in differences)])


def _earlier_text(earlier: Earlier) -> str:
    return f"  up to step {earlier.until} the run had another {', '.join(earlier.was)} (`earlier` in record.json)"
