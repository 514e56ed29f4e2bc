"""Writes the record of a run at a start, with the files that it names, and says how this start differs from the one before."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.errors import CheckpointError, PreparedDataError, ProjectError
from common.files import (
    UnusableFileError,
    commit_directory,
    digest_bytes,
    open_input,
    own_folder,
    unfinished_path,
    write_atomic,
)
from common.redaction import redacted_settings
from common.settings.dotted import flatten, to_toml
from common.settings.markers import FOLDER, MOVEABLE, PER_START
from common.settings.model import settings_with
from common.untrusted import digest_run_file
from data_pipeline.conversations.chat_template import TEMPLATE_FILE, saved_template
from data_pipeline.tokenizer import load_tokenizer
from data_pipeline.tokenizer.base import CONFIG_FILE
from trainer.config import TrainConfig
from trainer.extensions.files import write_copies
from trainer.machine.determinism import not_compared
from trainer.machine.environment import ChangedFact, environment_facts, find_differences, same_facts
from trainer.runs.layout import CONFIG, TASK_FOLDER, TOKENIZER
from trainer.runs.record import Earlier, Record, digests_of, write_record
from trainer.runs.saved_run import SavedRun, parse_settings
from trainer.training.start.build import Restored
from trainer.training.start.check import Continued
from trainer.training.start.identity import with_newer_settings
from trainer.training.start.plan import StartPlan

_log = logging.getLogger(__name__)
_UNREPORTED = frozenset(settings_with(TrainConfig, FOLDER, MOVEABLE, PER_START))


def open_record(plan: StartPlan, continued: Continued, restored: Restored) -> tuple[ChangedFact, ...]:
    """Write the record and the files that it names. Return how identity, environment and settings of a resumed run differ."""
    plan.earlier[0].undo.pop_all()
    context, identity, before = plan.context, continued.identity, continued.before
    of_task, trainable = plan.task.files, restored.trainable
    run, config, manifest, step = context.config.run, context.config, context.manifest, restored.progress.step
    settings = to_toml("train", redacted_settings(config.model_dump(mode="json")))
    environment = environment_facts() | {"world_size": context.group.world_size}
    earlier, differences = ([], ()) if before is None else _since_before(before, step, identity, environment, settings)
    write_atomic(run / CONFIG, settings.encode())
    _place_tokenizer(config, {} if before is None else before.record.files)
    copies = write_copies(run, plan.extension.files)
    if of_task:
        own_folder(run / TASK_FOLDER)
    for name, data in of_task.items():
        write_atomic(run / TASK_FOLDER / name, data)
    names = sorted(path.relative_to(run).as_posix() for path in (run / TOKENIZER).iterdir())
    names += [*(f"{TASK_FOLDER}/{name}" for name in of_task), *copies]
    record = Record.model_validate(
        {
            "format": 1,
            "status": "training",
            "identity": dict(identity),
            "changes": list(restored.adjustments.made),
            "precision": asdict(plan.precision),
            "data": {
                "root_digest": manifest.root_digest,
                "tokenizer_digest": manifest.tokenizer_digest,
                **({"cleaning": manifest.cleaning} if config.objective == "classification" else {}),
            },
            "environment": environment,
            "earlier": earlier,
            "files": {CONFIG: digest_bytes(settings.encode())} | digests_of(run, names),
        }
    )
    for name, origin in (("initial", continued.initial), ("origin", None if before is None else before.record.origin)):
        record = record if origin is None else record.changed(**{name: origin})
    if trainable.num_trained < trainable.num_weights:
        record = record.changed(trained_weights=trainable.num_trained, total_weights=trainable.num_weights)
    write_record(run, record)
    for path in run.glob("change-*.json"):  # the record holds them now
        path.unlink()
    return differences


def _since_before(
    start: SavedRun, step: int, identity: Mapping[str, Any], environment: Mapping[str, Any], settings: str
) -> tuple[list[Earlier], tuple[ChangedFact, ...]]:
    record = start.record
    skipped = not_compared(record.identity, identity)
    before, now = same_facts(record.environment.to_json(), environment)
    known = with_newer_settings(record.identity, identity)
    before |= {name: value for name, value in known.items() if name not in skipped}
    now |= {name: value for name, value in identity.items() if name not in skipped}
    earlier = [one.model_copy(update={"until": min(one.until, step)}) for one in record.earlier]
    deciding = record.identity.keys() | identity.keys()
    if was := {one.name: one.recorded for one in find_differences(before, now)}:
        earlier.append(Earlier(until=step, was=was))
    with suppress(OSError, ValueError, CheckpointError):  # a damaged file of settings is written again
        before = _reported_settings(start.settings) | before
        now = _reported_settings(parse_settings(settings.encode())) | now
    return earlier, find_differences(before, now, deciding)


def _reported_settings(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by their full names, without paths and without settings for one start."""
    settings = flatten(redacted_settings(recorded))  # an older version stored secrets
    return {name: value for name, value in settings.items() if name not in _UNREPORTED}


def _place_tokenizer(config: TrainConfig, recorded: Mapping[str, str]) -> None:
    """Copy the tokenizer of the data, unless the run has the recorded one. A start that left no checkpoint may have had another.

    The ids of ends and the chat template of the run that this one begins with come too, as far as the data has none.
    """
    source, target = config.data / "tokenizer", config.run / TOKENIZER
    found, wanted = _contents(target), _contents(source, PreparedDataError)
    prefix = f"{TOKENIZER}/"
    if found and found == {name.removeprefix(prefix): one for name, one in recorded.items() if name.startswith(prefix)}:
        return
    parent = config.branch.run or config.init
    inherited = {} if parent is None else _inherited(source, parent / TOKENIZER)
    if found == wanted | {name: digest_bytes(content) for name, content in inherited.items()}:
        return
    temporary = unfinished_path(target)
    temporary.mkdir()
    for name in sorted(wanted.keys() - inherited.keys()):
        try:
            with open_input(source / name, below=config.data) as file, (temporary / name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
        except UnusableFileError as error:
            raise PreparedDataError(f"{error}; run `prepare` again") from None
    for name, content in inherited.items():
        (temporary / name).write_bytes(content)
    shutil.rmtree(target, ignore_errors=True)
    commit_directory(temporary, target)


def take_over_ends(plan: StartPlan) -> None:
    """Let the samples of a run that begins with another run end where its texts end: its folder has the ends of both."""
    config = plan.context.config
    if config.init is not None or config.branch.run is not None:
        own = plan.context.group.on_main(lambda: load_tokenizer(config.run / TOKENIZER, trial=False).usage)
        plan.data.tokenizer.use_as(own)


def _inherited(source: Path, parent: Path) -> dict[str, bytes]:
    """Return the files that differ from those of the data's tokenizer, by name."""
    if not parent.is_dir():
        _log.warning("%s: missing, so the run has no ends of texts and no chat template but those of its data", parent)
        return {}
    tokenizer, before = load_tokenizer(source, trial=False), load_tokenizer(parent)
    files = {}
    if missing := [one for one in before.end_ids if one not in tokenizer.end_ids]:
        tokenizer.use_as(tokenizer.usage | {"eos_token_ids": [*tokenizer.end_ids, *missing]})
        files[CONFIG_FILE] = tokenizer.files()[CONFIG_FILE]
    template = saved_template(parent, before)
    if template is not None and saved_template(source, tokenizer) is None:
        files[TEMPLATE_FILE] = template.source.encode()
    return files


def _contents(folder: Path, error: type[ProjectError] = CheckpointError) -> dict[str, str]:
    """Return the digests of the files in a folder, by name; empty if there is no folder. Raises `error` for an irregular file."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise error(f"{folder} is a link or a file, and a directory is needed there; remove it, or use another run")
    try:
        return {path.name: digest_run_file(folder, path.name) for path in folder.iterdir()} if folder.exists() else {}
    except CheckpointError as found:
        raise error(str(found)) from None
