"""Loads the Python files of the user: their functions are called by the training, or replace model, loss or step. See `HOOKS`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import MappingProxyType, ModuleType

from common.errors import ConfigError
from trainer.extensions.files import PACKAGE, digest_of, digests_of, read_extension
from trainer.extensions.hooks import HOOKS, LIKENESS, Extension, described, place_of


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
