"""Loads a Python file of the user: its functions are called by the training, or replace model, loss or step. See `HOOKS`."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType

from common.errors import ConfigError
from common.files import UnusableFileError, read_input
from common.untrusted import MAX_EXTENSION_BYTES
from trainer.extensions.hooks import HOOKS, LIKENESS, Extension, described, line_in, line_of, place_of


def load_extension(path: Path | None) -> Extension:
    if path is None:
        return Extension()
    try:
        source = read_input(path, MAX_EXTENSION_BYTES)
    except (OSError, UnusableFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"extension = {path}: cannot be read ({reason}); name a Python file") from None
    return execute_extension(path, source)


def execute_extension(path: Path, source: bytes) -> Extension:
    """Execute a user's file once, as a separate module. It can import installed packages; its directory is not searched."""
    module = _run_file(path, source)
    _refuse_near_misses(path, module)
    hooks = {name: getattr(module, name) for name in HOOKS if hasattr(module, name)}
    if not hooks:
        raise ConfigError(f"{path}: defines none of {', '.join(HOOKS)}; define at least one, or train without --extension")
    for name, hook in hooks.items():
        _check_signature(path, name, hook)
    return Extension(path, source, MappingProxyType(hooks))


def _run_file(path: Path, source: bytes) -> ModuleType:
    name = f"trainer_extension_{hashlib.sha256(source).hexdigest()[:16]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look up their module by name
    try:
        # The import system could run a stale .pyc. Compiling here runs the bytes that the digest covers.
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        line, reason = line_in(path, error), str(error)
        if isinstance(error, SyntaxError):
            line, reason = error.lineno, error.msg  # its text repeats the place
        raise ConfigError(
            f"{place_of(path, line)}: {type(error).__name__}: {reason}; correct the file, or train without --extension"
        ) from error
    return module


def _refuse_near_misses(path: Path, module: ModuleType) -> None:
    for name, value in vars(module).items():
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        if name in HOOKS or name.startswith("_") or not (own or name.startswith("on_")):
            continue
        nearest = difflib.get_close_matches(name.lower(), HOOKS, n=1, cutoff=0 if name.startswith("on_") else LIKENESS)
        if nearest:
            raise ConfigError(
                f"{place_of(path, line_of(value))}: nothing calls {name}; did you mean {nearest[0]}? "
                f"If only the file itself uses this function, begin its name with an underscore"
            )


def _check_signature(path: Path, name: str, hook: object) -> None:
    wanted = f"def {name}({', '.join(HOOKS[name])})"
    if not callable(hook):
        raise ConfigError(f"{path}: {name} is {described(hook)}; it must be a function, {wanted}")
    if inspect.iscoroutinefunction(hook) or inspect.isgeneratorfunction(hook):
        raise ConfigError(
            f"{place_of(path, line_of(hook))}: {name} is async or has a yield, and would not run when called; use {wanted}"
        )
    try:
        signature = inspect.signature(hook)
    except ValueError:  # some built-in functions have no signature
        return
    try:
        signature.bind(*HOOKS[name])
    except TypeError:
        raise ConfigError(
            f"{place_of(path, line_of(hook))}: {name}{signature} is called with other arguments; use {wanted}"
        ) from None
