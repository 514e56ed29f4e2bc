"""Trains, evaluates and verifies language models. `loop` tells the whole story; `library` has the names for programs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.library import *  # noqa: F403


def __dir__() -> list[str]:
    return [*globals(), *import_module("trainer.library").__all__]


def __getattr__(name: str) -> Any:
    # imported when it is used, because the launcher of a training works without torch
    if not name.startswith("_") and name in (library := import_module("trainer.library")).__all__:
        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
