"""Decides whether the extension in a run folder may be executed.

A run folder may come from a stranger, and its `extension.py` or `extension/` is code. It is executed only if its files have the
digests in the record of the run, and if the user trusts them: by the option `--trust-code`, or because this user has trained with
the same files on this machine. The digests of such extensions are in a list of the user,
`$XDG_STATE_HOME/training-environment/extensions` (`~/.local/state` if the variable is not set). A list that another user can write
is ignored.
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
from trainer.extensions.files import Digests, copy_name, copy_of, digest_of, digests_of
from trainer.extensions.hooks import Extension
from trainer.extensions.loading import execute_extension
from trainer.runs.layout import EXTENSION, EXTENSION_FOLDER, RECORD, is_extension

_log = logging.getLogger(__name__)

_MAX_LIST_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def run_extension(run: Path, recorded: object, *, trust_code: bool) -> Extension:
    """`recorded` is `extension` of the identity in the run's record."""
    files = checked_extension(run, recorded, trust_code=trust_code)
    if files is not None:
        return execute_extension(copy_of(run, files), files)
    for name in (EXTENSION, EXTENSION_FOLDER):
        if os.path.lexists(run / name):
            _log.warning("%s is not executed: the record names no extension, so this does not belong to the run", run / name)
    return Extension()


def checked_extension(run: Path, recorded: object, *, trust_code: bool) -> dict[str, bytes] | None:
    """Return the files of a run's extension if they may be executed; None if the run has none. Raises as `run_extension` does."""
    files = recorded_files(run, recorded)
    if files is not None and not trust_code and digest_of(digests_of(files)) not in _listed():
        raise ConfigError(
            f"{copy_of(run, files)} is code that came with the run, and you have not trained with it on this machine, so it is not "
            "executed; read it, and if you trust it, add --trust-code"
        )
    return files


def recorded_files(run: Path, recorded: object) -> dict[str, bytes] | None:
    if recorded is None:
        return None
    digests = {"": recorded} if isinstance(recorded, str) else recorded
    if not isinstance(digests, dict) or not digests or not all(map(_is_digest, digests, digests.values())):
        raise CheckpointError(f"{run / RECORD}: extension is not a digest; the record was changed, restore it from a copy")
    return {name: _checked_file(run, copy_name(name), digest) for name, digest in digests.items()}


def _is_digest(name: object, digest: object) -> bool:
    return is_extension(copy_name(str(name))) and isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def _checked_file(run: Path, name: str, recorded: str) -> bytes:
    path = run / name
    try:
        source = read_input(path, MAX_EXTENSION_BYTES, below=run)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: missing, but the record names it; restore it from a copy") from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; restore it from a copy") from None
    if (found := digest_bytes(source)) != recorded:
        raise CheckpointError(
            f"{path}: its digest is {found}, but the record says {recorded}; the file was changed and is not executed: "
            "restore it from a copy"
        )
    return source


def note_trained_with(digests: Digests) -> None:
    """Add an extension to the user's list. If the list cannot be written, log a warning."""
    digest = digest_of(digests)
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
