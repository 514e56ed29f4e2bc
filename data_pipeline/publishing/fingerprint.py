from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import UnusableFileError, canonical_json, digest_bytes, digest_file
from common.settings.model import Section
from data_pipeline.config import PrepareConfig, portable_settings
from data_pipeline.conversations.chat_template import template_source
from data_pipeline.sources.formats import printable
from data_pipeline.sources.listing import files_below
from data_pipeline.stages.train_quality import files_of_reference
from data_pipeline.tokenizer import supplied_files

PIPELINE_VERSION = 5
"""Increased when the same settings and input give other bytes."""
EARLIER_VERSIONS = (4,)
"""Finished data of these is still used, because runs that have begun with it need it. Unfinished work is not."""

_READER_OF_CHATS = 2
"""Increased when some records of conversations are read in another way. Unfinished work is not continued; finished data is used."""


def settings_of(config: PrepareConfig) -> dict[str, Any]:
    """Return the settings that decide the result. A path is replaced by the digest of the file's content."""
    settings = portable_settings(config)
    for name, values in settings.items():
        if isinstance(section := getattr(config, name), Section):
            files = {field: _digest_of_files(f"{name}.{field}", getattr(section, field)) for field in type(section).model_fields}
            settings[name] = values | {field: digest for field, digest in files.items() if digest is not None}
    if config.chat.is_on:
        source = template_source(config.chat, config.tokenizer)
        settings["chat"] = {**settings["chat"], "digest": digest_bytes(source.encode())}
    return settings


def _digest_of_files(setting: str, value: Any) -> Any:
    """Return the digest for a path, a list of digests for several, None for any other value."""
    if isinstance(value, tuple) and value and isinstance(value[0], Path):
        return [_digest_of_files(setting, path) for path in value]
    if not isinstance(value, Path):
        return None
    try:
        if setting == "tokenizer.path":
            files = _files_of_tokenizer(value)
        elif setting == "quality.reference" and (parts := files_of_reference(value)):
            files = [(path.name, path) for path in parts]
        elif value.is_dir():
            files = [(file.relative_to(value).as_posix(), file) for file in sorted(files_below(value))]
        else:
            files = [(_extensions(value), value)]  # a single file counts by its extensions, not by its name
        return digest_bytes(canonical_json([[printable(name), digest_file(path)] for name, path in files]))
    except OSError as error:
        raise ConfigError(f"{setting} = {value}: cannot be read ({error.strerror}); check the path") from None
    except UnusableFileError as error:
        raise ConfigError(f"{setting} = {value}: {error}") from None


def _files_of_tokenizer(path: Path) -> list[tuple[str, Path]]:
    """Return the files that a supplied tokenizer is read from. The name of a file in a run or prepared data decides its kind."""
    model, *beside = supplied_files(path)
    name = _extensions(model) if path in (model, model.parent) else model.name
    return [(name, model), *((file.name, file) for file in beside)]


def _extensions(path: Path) -> str:
    return "".join(path.suffixes[-2:])


def fingerprint_of(settings: Mapping[str, Any], inputs: Sequence[Mapping[str, Any]], version: int = PIPELINE_VERSION) -> str:
    return digest_bytes(canonical_json({"version": version, "config": settings, "inputs": list(inputs)}))


def key_of_work(fingerprint: str, config: PrepareConfig) -> str:
    """Return a digest that names the work folder. Work that keeps all rejected documents has a separate folder."""
    parts = [fingerprint, *([f"chats {_READER_OF_CHATS}"] if config.chat.is_on else [])]
    parts += ["all rejects"] if config.keep_rejects == "all" else []
    return digest_bytes(", ".join(parts).encode()) if len(parts) > 1 else fingerprint
