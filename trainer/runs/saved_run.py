"""A run on the disk: each of its files is read when it is first needed, checked, and then kept."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from common.errors import CheckpointError, PreparedDataError
from common.files import digest_bytes
from common.settings.dotted import parse_toml
from common.settings.load import MAX_SETTINGS_BYTES
from common.settings.messages import explain
from common.settings.model import with_current_names
from common.untrusted import (
    read_run_file,
)
from data_pipeline.dataset.layout import MANIFEST
from trainer.config import TrainConfig
from trainer.runs.layout import CONFIG, RECORD, manifest_path, not_a_run, saved_steps
from trainer.runs.manifest import MAX_MANIFEST_BYTES, CheckpointManifest, OtherFormatError
from trainer.runs.record import Record, parse_record, record_bytes
from trainer.runs.state import RunState

_RESTORE = "put the file back as the run wrote it, or use another run"


class SavedRun:
    """The folder of a run. The attributes raise CheckpointError if a file is missing, damaged or not a file that a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifests: dict[int, tuple[CheckpointManifest, str]] = {}

    @cached_property
    def _record_bytes(self) -> bytes:
        return record_bytes(self.path)

    @cached_property
    def record(self) -> Record:
        return parse_record(self.path, self._record_bytes)

    @property
    def record_digest(self) -> str:
        return digest_bytes(self._record_bytes)

    @property
    def record_if_any(self) -> Record | None:
        return self.record if (self.path / RECORD).exists() else None

    @cached_property
    def settings(self) -> dict[str, Any]:
        path = self.path / CONFIG
        try:
            return parse_settings(read_run_file(path, MAX_SETTINGS_BYTES, self.path))
        except FileNotFoundError:
            raise CheckpointError(not_a_run(self.path, CONFIG)) from None
        except ValueError as error:
            raise CheckpointError(f"{path}: the settings cannot be read ({error}); {_RESTORE}") from None

    @cached_property
    def config(self) -> TrainConfig:
        try:
            config = TrainConfig.model_validate(self.settings)
        except ValidationError as error:
            raise CheckpointError(f"{self.path / CONFIG}: {explain(TrainConfig, error)}; {_RESTORE}") from None
        for name, value in (("batch.micro_batch_size", config.batch.micro_batch_size), ("precision", config.precision)):
            if value == "auto":
                raise CheckpointError(f"{self.path / CONFIG}: {name} = auto, but a run writes the value that it chose; {_RESTORE}")
        return config

    @property
    def steps(self) -> list[int]:
        return saved_steps(self.path)

    def manifest(self, step: int) -> CheckpointManifest:
        return self._read_manifest(step)[0]

    def manifest_digest(self, step: int) -> str:
        """The digest of a manifest, which has the digests of all tensors of its checkpoint."""
        return self._read_manifest(step)[1]

    def _read_manifest(self, step: int) -> tuple[CheckpointManifest, str]:
        if step not in self._manifests:
            path = manifest_path(self.path, step)
            try:
                content = read_run_file(path, MAX_MANIFEST_BYTES, self.path)
                self._manifests[step] = CheckpointManifest.from_file(content), digest_bytes(content)
            except OtherFormatError as error:
                raise CheckpointError(f"{path}: {error}") from None
            except (FileNotFoundError, ValueError) as error:
                raise CheckpointError(f"{path}: {error}; restore it from a copy, or choose another checkpoint") from None
        return self._manifests[step]

    def state(self, step: int) -> RunState:
        """The counters in the checkpoint of a step. The tensors are not read."""
        return RunState.of_manifest(manifest_path(self.path, step), self.manifest(step).state)

    def data_folder(self, data: Path | None) -> Path:
        if data is not None:
            return data
        named = self.config.data
        try:
            is_there = (named / MANIFEST).exists()
        except (OSError, ValueError):  # a name that no file can have
            is_there = False
        if not is_there:
            why = "" if named.is_absolute() else f": the run names it {named}, as seen from where it was trained"
            raise PreparedDataError(
                f"{self.path}: its data was looked for in {named.absolute()}, and no {MANIFEST} is there{why}; name its folder "
                "with --data"
            )
        return named


def parse_settings(toml: bytes) -> dict[str, Any]:
    """Return the settings in the content of a `config.toml`. Raises ValueError if it holds none."""
    settings = parse_toml(toml).get("train")
    if not isinstance(settings, dict):
        raise ValueError("train is not a table of settings")
    return with_current_names(TrainConfig, settings)
