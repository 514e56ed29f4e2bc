"""Loads the Python files of the user (see `HOOKS`), and decides whether those of a run folder may be executed.

A run folder may come from a stranger, and its `extension.py` or `extension/` is code. It is executed only if its files have the
digests in the record of the run, and if the user trusts them: by the option `--trust-code`, or because this user has trained with
the same files on this machine. The digests of such extensions are in a list of the user,
`$XDG_STATE_HOME/training-environment/extensions` (`~/.local/state` if the variable is not set). A list that another user can write
is ignored.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
import stat
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, digest_bytes, read_input
from common.untrusted import MAX_EXTENSION_BYTES
from trainer.extensions.files import PACKAGE, Digests, copy_name, copy_of, digest_of, digests_of, read_extension
from trainer.extensions.hooks import HOOKS, LIKENESS, Extension, described, place_of
from trainer.runs.layout import EXTENSION, EXTENSION_FOLDER, RECORD, is_extension

_log = logging.getLogger(__name__)

_MAX_LIST_BYTES = 1 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def load_extension(path: Path | None) -> Extension:
    return Extension() if path is None else execute_extension(path, read_extension(path))


def execute_extension(path: Path, files: Mapping[str, bytes]) -> Extension:
    """Execute a user's files once, as a separate module or package. It can import installed packages and its own files."""
    module = _executed(path, files)
    _refuse_near_misses(path, module)
    hooks = {name: getattr(module, name) for name in HOOKS if hasattr(module, name)}
    hooks = {name: hook for name, hook in hooks.items() if not isinstance(hook, ModuleType)}  # a file may be called loss.py
    if not hooks:
        raise ConfigError(f"{path}: defines none of {', '.join(HOOKS)}; define at least one, or train without --extension")
    for name, hook in hooks.items():
        _check_signature(path, name, hook)
    return Extension(path, MappingProxyType(dict(files)), MappingProxyType(hooks))


class _Importer(MetaPathFinder, SourceLoader):  # type: ignore[misc]  # typeshed: SourceLoader differs from its own base
    """Imports an extension from the bytes that the digests cover. Files on the disk may change, and a .pyc may be stale."""

    def __init__(self, name: str, path: Path, files: Mapping[str, bytes]) -> None:
        self.name, self._path, self._files = name, path, files

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.name and not name.startswith(f"{self.name}."):
            return None
        inner = name[len(self.name) + 1 :].replace(".", "/")
        for file in ("", PACKAGE) if not inner else (f"{inner}/{PACKAGE}", f"{inner}.py"):
            if file in self._files:
                spec = ModuleSpec(name, self, origin=str(self._path / file), is_package=file.endswith(PACKAGE))
                spec.has_location = True  # gives the module its __file__
                return spec
        is_folder = any(file.startswith(f"{inner}/") for file in self._files)
        return ModuleSpec(name, None, is_package=True) if is_folder else None

    def get_filename(self, name: str) -> str:
        spec = self.find_spec(name)
        if spec is None or spec.origin is None:
            raise ImportError(name)
        return spec.origin

    def get_data(self, path: str) -> bytes:
        """Return the content of a file. `pkgutil.get_data` calls this too."""
        name = Path(path).relative_to(self._path).as_posix()
        return self._files["" if name == "." else name]


def _executed(path: Path, files: Mapping[str, bytes]) -> ModuleType:
    name = f"trainer_extension_{digest_of(digests_of(files)).removeprefix('sha256:')[:16]}"
    for loaded in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
        del sys.modules[loaded]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Importer) and finder.name == name)]
    sys.meta_path.append(_Importer(name, path, files))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)  # its text repeats the place
        raise ConfigError(
            f"{place_of(path, error)}: {type(error).__name__}: {reason.replace(name, path.stem)}; correct the file, or train "
            "without --extension"
        ) from error


def _refuse_near_misses(path: Path, module: ModuleType) -> None:
    for name, value in vars(module).items():
        if isinstance(value, ModuleType):
            continue
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if name in HOOKS or name.startswith("_") or not (own or name.startswith("on_")):
            continue
        nearest = difflib.get_close_matches(name.lower(), HOOKS, n=1, cutoff=0 if name.startswith("on_") else LIKENESS)
        if nearest:
            raise ConfigError(
                f"{place_of(path, value)}: nothing calls {name}; did you mean {nearest[0]}? "
                f"If only the file itself uses this function, begin its name with an underscore"
            )


def _check_signature(path: Path, name: str, hook: object) -> None:
    wanted = f"def {name}({', '.join(HOOKS[name])})"
    if not callable(hook):
        raise ConfigError(f"{path}: {name} is {described(hook)}; it must be a function, {wanted}")
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise ConfigError(f"{place_of(path, hook)}: {name} is async or has a yield, and would not run when called; use {wanted}")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*HOOKS[name])
    except TypeError:
        raise ConfigError(f"{place_of(path, hook)}: {name}{signature} is called with other arguments; use {wanted}") from None


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
