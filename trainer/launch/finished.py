"""Recognises the start of a run that has finished already, before torch is loaded and without the data."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from operator import attrgetter

from common.command_line import command_text
from common.errors import ExitCode, ProjectError
from common.files import UnusableFileError, digest_file
from common.redaction import redacted
from common.settings.markers import ASKED_AGAIN, MOVEABLE, PER_START
from common.settings.model import setting_names, settings_with
from common.text import visible
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import read_manifest
from trainer.config import LimitsConfig, TrainConfig
from trainer.runs.layout import CHECKPOINTS, object_path
from trainer.runs.record import Record
from trainer.runs.saved_run import SavedRun
from trainer.watchdog.processes import write_exit_code

_UNCOMPARED = settings_with(TrainConfig, MOVEABLE, PER_START)


def report_finished(config: TrainConfig) -> bool:
    """If this start has nothing to train, say so on stderr with the command to train longer, print the result, return True."""
    if os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1"):
        return False  # nodes that see different files would wait for each other
    record = finished_as(config)
    if record is None:
        return False
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_exit_code(f"{ExitCode.DONE:d}")
    if os.environ.get("RANK", "0") == "0":
        lines = nothing_to_train(config, "finished", record.step or 0, record.ended_by or "")
        sys.stderr.write(visible(redacted("\n".join(lines))) + "\n")
        sys.stdout.write(f"weights {record.weights} steps {record.step}\n")
    return True


def nothing_to_train(config: TrainConfig, status: str, step: int, ended_by: str) -> tuple[str, ...]:
    run = config.run
    has = f"is finished: {step} steps" if status == "finished" else f"has {step} steps"
    return (
        f"{run} {has}, ended by {ended_by}. Nothing is left to train, and no file was changed.",
        f"To train longer: {longer_command(config, ended_by)}",
        "The learning-rate curve then differs from that of an uninterrupted run of that length, and so do the results.",
        f"To write text: {command_text('generate', run, '--prompt', 'The ')}",
    )


def finished_as(config: TrainConfig) -> Record | None:
    """Return the record of the run if it finished with these settings, its data and an intact last checkpoint; else None."""
    saved = SavedRun(config.run)
    with suppress(OSError, ValueError, ProjectError, UnusableFileError):
        record = saved.record
        if record.status != "finished" or record.step is None or not record.weights or not record.ended_by:
            return None
        schedule, used = config.schedule, saved.config.schedule.warmup_steps
        if schedule.decay_steps is None and used < record.step <= schedule.warmup_steps:  # a short run has a shorter warm-up
            config = config.model_copy(update={"schedule": schedule.model_copy(update={"warmup_steps": used})})
        if not is_same(config, saved.config):
            return None
        if (config.data / MANIFEST).exists() and read_manifest(config.data).root_digest != record.data.root_digest:
            return None
        checkpoints = config.run / CHECKPOINTS
        objects = saved.manifest(record.step).objects
        if all(digest_file(object_path(checkpoints, name), below=checkpoints) == f"sha256:{name}" for name in objects):
            return record
    return None


def longer_command(config: TrainConfig, ended_by: str) -> str:
    section, _, ended = ended_by.partition(".")
    words: list[object] = ["--run", config.run]
    for name in settings_with(TrainConfig, ASKED_AGAIN):
        value = attrgetter(name)(config)
        words += [] if value is None else [f"--{name}", value]
    if section != "limits" or ended not in LimitsConfig.model_fields:
        return command_text("train", *words, "--eval.patience", "none")
    if ended == "minutes":
        words += ["--limits.minutes", f"{2 * (config.limits.minutes or 1):g}", "--resume.allow_changes", "cooldown"]
        return command_text("train", *words)
    value = getattr(config.limits, ended)
    words += [f"--limits.{ended}", 2 * value]
    for other in LimitsConfig.model_fields:
        words += [f"--limits.{other}", "none"] if other != ended and getattr(config.limits, other) is not None else []
    return command_text("train", *words, "--resume.allow_changes", "schedule.decay_steps")


def is_same(config: TrainConfig, recorded: TrainConfig) -> bool:
    """Return whether the settings are those of the last start. A run records the value that it chose for `auto`."""
    names = [name for name in setting_names(TrainConfig) if name not in _UNCOMPARED]
    return all(attrgetter(name)(config) in ("auto", attrgetter(name)(recorded)) for name in names)
