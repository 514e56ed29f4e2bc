"""The tasks by name, for a training and for a saved run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from common.errors import CheckpointError, ConfigError
from common.untrusted import digest_run_file, read_run_file
from data_pipeline.dataset.manifest import Manifest
from trainer.config import TrainConfig
from trainer.finetuning import classification
from trainer.finetuning.distillation import gather_teacher, make_distillation
from trainer.finetuning.preference import gather_preference, make_preference
from trainer.finetuning.task import LANGUAGE, TASK_FOLDER, Kind, Task
from trainer.runs.record import read_record

__all__ = ["KINDS", "make_task", "saved_task"]

_MAX_FILE_BYTES = 64 << 20
_REPLACED = ("build_model", "loss", "training_step")

KINDS: dict[str, Kind] = {
    "language": Kind(lambda _config, _manifest: {}, lambda _config, _files: LANGUAGE),
    "classification": Kind(classification.gather, classification.make),
    "distillation": Kind(gather_teacher, make_distillation),
    "preference": Kind(gather_preference, make_preference),
}


def make_task(config: TrainConfig, manifest: Manifest, hooks: Mapping[str, object]) -> Task:
    """Return the task of a training.

    Args:
        config: the settings.
        manifest: the prepared data.
        hooks: functions of the user's extension.

    Raises:
        ConfigError: settings and data do not fit the task, or the extension replaces the same parts.
    """
    if manifest.has_pairs and config.objective != "preference":
        raise ConfigError(
            f"{config.data} has preference pairs, and objective = {config.objective} would train on the worse answers too; use "
            "--objective preference, or other data"
        )
    kind = KINDS[config.objective]
    files = MappingProxyType(dict(kind.gather(config, manifest)))
    task = kind.make(config, files)
    both = [name for name in _REPLACED if name in hooks]
    if both and task is not LANGUAGE:
        raise ConfigError(
            f"objective = {config.objective} brings its own model and loss, and the extension defines {', '.join(both)}; remove "
            "these functions from the extension, or use objective = language"
        )
    return replace(task, files=files)


def saved_task(run: Path, config: TrainConfig) -> Task:
    """Return the task of a run, from the files that the run keeps.

    Raises:
        CheckpointError: a file is missing or was changed.
    """
    recorded = read_record(run).files
    prefix = f"{TASK_FOLDER}/"
    files = {}
    for name in sorted(name for name in recorded if name.startswith(prefix)):
        if digest_run_file(run, name) != recorded[name]:
            raise CheckpointError(f"{run / name}: the file was changed; restore it from a copy")
        files[name.removeprefix(prefix)] = read_run_file(run / name, _MAX_FILE_BYTES, run)
    return replace(KINDS[config.objective].make(config, files), files=MappingProxyType(files))
