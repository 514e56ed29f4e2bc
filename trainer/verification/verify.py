"""The levels of `verify`, which docs/training.md lists. Each level includes the levels before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, ConfigError
from common.text import some_of
from data_pipeline.dataset.manifest import read_manifest
from trainer.distributed.group import joined_group
from trainer.machine.determinism import configure_determinism, device_name, flags, not_compared, settings_here, threads_per_rank
from trainer.machine.environment import ChangedFact, describe_unlocked, environment_facts, find_differences, same_facts
from trainer.model.attention import backend_of
from trainer.model.forward import own_kernels
from trainer.runs.record import NEVER_TRAINED, Earlier, Origin, check_was_trained
from trainer.runs.saved_run import SavedRun
from trainer.verification.integrity import Integrity, Outcome, TrainedIntegrity, check_integrity, check_untrained, prepare_again
from trainer.verification.replay import Train, replay_run

LEVELS = ("integrity", "environment", "data", "replay")
# Without threads: a replay uses the recorded number.
_IN_IDENTITY = ("device", "torch", "attention", "kernels", "nccl", "nodes", "optimizer", "flags.")
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
