"""Decides whether the extension in a run folder may be executed.

A run folder may come from a stranger, and its `extension.py` is code. It is executed only if its content has the digest in the
record of the run, and if the user trusts it: by the option `--trust-code`, or because this user has trained with the same content
on this machine. The digests of such files are in a list of the user, `$XDG_STATE_HOME/training-environment/extensions`
(`~/.local/state` if the variable is not set). A list that another user can write is ignored.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from pathlib import Path

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, digest_bytes, read_input
from common.untrusted import MAX_EXTENSION_BYTES
from trainer.extensions.hooks import Extension
from trainer.extensions.loading import execute_extension
from trainer.runs.layout import RECORD

_log = logging.getLogger(__name__)

EXTENSION = "extension.py"  # name of the copy of the extension in a run folder
_MAX_LIST_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def run_extension(run: Path, recorded: object, *, trust_code: bool) -> Extension:
    """`recorded` is `extension` of the identity in the run's record."""
    source = checked_extension(run, recorded, trust_code=trust_code)
    if source is None and os.path.lexists(run / EXTENSION):
        _log.warning("%s is not executed: the record names no extension, so this file does not belong to the run", run / EXTENSION)
    return Extension() if source is None else execute_extension(run / EXTENSION, source)


def checked_extension(run: Path, recorded: object, *, trust_code: bool) -> bytes | None:
    """Return the content of a run's extension if it may be executed; None if the run has none. Raises as `run_extension` does."""
    source = recorded_source(run, recorded)
    if source is not None and not trust_code and digest_bytes(source) not in _listed():
        raise ConfigError(
            f"{run / EXTENSION} is code that came with the run, and you have not trained with this file on this machine, so it is "
            "not executed; read it, and if you trust it, add --trust-code"
        )
    return source


def recorded_source(run: Path, recorded: object) -> bytes | None:
    if recorded is None:
        return None
    if not isinstance(recorded, str) or not _DIGEST.fullmatch(recorded):
        raise CheckpointError(f"{run / RECORD}: extension is not a digest; the record was changed, restore it from a copy")
    path = run / EXTENSION
    try:
        source = read_input(path, MAX_EXTENSION_BYTES, below=run)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, but the record names it; restore it from a copy") from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; restore it from a copy") from None
    if (found := digest_bytes(source)) != recorded:
        raise CheckpointError(
            f"{path}: its digest is {found}, but the record says {recorded}; the file was changed and is not executed: "
            "restore it from a copy"
        )
    return source


def note_trained_with(digest: str) -> None:
    """Add the digest of an extension to the user's list. If the list cannot be written, log a warning."""
    try:
        if digest in _listed():
            return
        path = _list_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _others_write(path.parent):
            raise PermissionError(f"another user owns or can write {path.parent}")
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or _others_write(path) or status.st_size + len(digest) >= _MAX_LIST_BYTES:
                raise PermissionError(f"{path} is not a private regular file of this user, or it is full; remove it")
            os.write(descriptor, f"{digest}\n".encode())
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        _log.warning(
            "the extension cannot be added to your list of trusted files (%s); generate, evaluate and verify --replay will require "
            "--trust-code",
            error,
        )


def _listed() -> frozenset[str]:
    path = _list_path()
    try:
        if any(_others_write(place) for place in (path.parent, path)):
            _log.warning("%s is ignored, because another user owns it or can write it; remove it", path)
            return frozenset()
        return frozenset(_DIGEST.findall(read_input(path, _MAX_LIST_BYTES, below=path.parent).decode("ascii", "replace")))
    except (OSError, ValueError):
        return frozenset()


def _others_write(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid != os.geteuid() or bool(status.st_mode & _WRITABLE_BY_OTHERS) or stat.S_ISLNK(status.st_mode)


def _list_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or ""
    if Path(state).is_absolute():  # the XDG specification says to ignore relative paths
        return Path(state) / "training-environment" / "extensions"
    try:
        return Path.home() / ".local" / "state" / "training-environment" / "extensions"
    except RuntimeError as error:  # a user id without a name and without HOME
        raise ValueError(error) from None
