"""Recognises the start of a run that has finished already, before torch is loaded and without the data."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.command_line import command_text
from common.errors import ExitCode, ProjectError
from common.files import UnusableFileError, digest_file, unsealed
from common.redaction import redacted
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.markers import Marker
from common.settings.model import setting_names, settings_with
from common.settings.toml import parse_toml
from common.text import visible
from common.untrusted import MAX_RECORD_BYTES, read_run_file
from data_pipeline.dataset.layout import MANIFEST
from data_pipeline.dataset.manifest import read_manifest
from trainer.config import LimitsConfig, TrainConfig
from trainer.watchdog.processes import write_exit_code

__all__ = ["finished_as", "is_same", "longer_command", "nothing_to_train", "recorded_settings", "report_finished"]

_MAX_MANIFEST_BYTES = 64 << 20
_UNCOMPARED = settings_with(TrainConfig, Marker.MOVEABLE, Marker.PER_START)


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
        lines = nothing_to_train(config, "finished", record["step"], record["ended_by"])
        sys.stderr.write(visible(redacted("\n".join(lines))) + "\n")
        sys.stdout.write(f"weights {record['weights']} steps {record['step']}\n")
    return True


def nothing_to_train(config: TrainConfig, status: str, step: int, ended_by: str) -> tuple[str, ...]:
    """Return the lines about a run with these settings of its last start, which has reached a limit after `step` steps."""
    run = config.run
    has = f"is finished: {step} steps" if status == "finished" else f"has {step} steps"
    return (
        f"{run} {has}, ended by {ended_by}. Nothing is left to train, and no file was changed.",
        f"To train longer: {longer_command(config, ended_by)}",
        "The learning-rate curve then differs from that of an uninterrupted run of that length, and so do the results.",
        f"To write text: {command_text('generate', run, '--prompt', 'The ')}",
    )


def finished_as(config: TrainConfig) -> dict[str, Any] | None:
    """Return the record of the run if it finished with these settings and its last checkpoint is intact; else None.

    Data that is there must be the data of the run. In all other cases the training decides, which also reports what is damaged.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, ProjectError, UnusableFileError, ValidationError):
        record = unsealed(read_run_file(config.run / "record.json", MAX_RECORD_BYTES, config.run))
        if record["status"] != "finished" or not is_same(_as_used(config, record["step"]), recorded_settings(config.run)):
            return None
        if (config.data / MANIFEST).exists() and read_manifest(config.data).root_digest != record["data"]["root_digest"]:
            return None
        if record["weights"] and record["ended_by"] and _is_saved(config.run, record["step"]):
            return record
    return None


def longer_command(config: TrainConfig, ended_by: str) -> str:
    """Return a command that continues a finished run, to twice its length if a limit has ended it."""
    section, _, ended = ended_by.partition(".")
    words: list[object] = ["--run", config.run]
    for name in settings_with(TrainConfig, Marker.ASKED_AGAIN):
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


def recorded_settings(run: Path) -> TrainConfig:
    """Return the settings of the last start of a run. Raises various errors if they cannot be read."""
    return TrainConfig.model_validate(parse_toml(read_run_file(run / "config.toml", MAX_SETTINGS_BYTES, run))["train"])


def _as_used(config: TrainConfig, num_steps: int) -> TrainConfig:
    """Return the settings with the warm-up that a run of so many steps has used: see `trainer.runs.limits.with_shorter_warmup`."""
    schedule, used = config.schedule, recorded_settings(config.run).schedule.warmup_steps
    if schedule.decay_steps is not None or not used < num_steps <= schedule.warmup_steps:
        return config
    return config.model_copy(update={"schedule": schedule.model_copy(update={"warmup_steps": used})})


def is_same(config: TrainConfig, recorded: TrainConfig) -> bool:
    """Return whether the settings are those of the last start. A run records the value that it chose for `auto`."""
    names = [name for name in setting_names(TrainConfig) if name not in _UNCOMPARED]
    own, before = config.model_dump(mode="json"), recorded.model_dump(mode="json")
    return all(_at(own, name) in ("auto", _at(before, name)) for name in names)


def _at(values: Mapping[str, Any], name: str) -> Any:
    for part in name.split("."):
        values = values[part]
    return values


def _is_saved(run: Path, step: int) -> bool:
    checkpoints = run / "checkpoints"
    path = checkpoints / f"step-{step:08d}" / "manifest.json"
    objects = unsealed(read_run_file(path, _MAX_MANIFEST_BYTES, path.parent))["objects"]
    return all(
        digest_file(checkpoints / "objects" / f"{name}.safetensors", below=checkpoints) == f"sha256:{name}" for name in objects
    )
