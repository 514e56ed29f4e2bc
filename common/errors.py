"""The errors that users meet: one leaf for each decision that they have to take, and the exit code that tells it to programs.

    ProjectError
    ├── ConfigError        2   change a setting: it is unknown, out of range, or contradicts another
    ├── DataError          3
    │   ├── SourceError        look at the input text: missing, empty, unreadable or malformed
    │   └── PreparedDataError  prepare again: the manifest or a shard is missing or damaged
    ├── CheckpointError    4   choose another checkpoint or run: this one is missing, damaged or belongs to another run
    ├── GuardError         5   look at the run: training stopped itself because its numbers went bad
    ├── WorkerError       71   give more memory or use fewer workers: a worker process was killed
    ├── StorageError      74   make room or give access: a file could not be written or read
    └── StoppedBySignal   75   nothing: run the same command again to go on

Every message says what was found, what is needed, where, and what to do.
"""

from __future__ import annotations

from enum import IntEnum

from common.files import UnusableFileError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "ExitCode",
    "GuardError",
    "PreparedDataError",
    "ProjectError",
    "SourceError",
    "StoppedBySignal",
    "StorageError",
    "WorkerError",
    "exit_code_of",
]


class ExitCode(IntEnum):
    """What a command's exit status means; documented in the README and kept stable."""

    DONE = 0
    CRASHED = 1
    CONFIG = 2
    DATA = 3
    CHECKPOINT = 4
    GUARD = 5
    WORKER = 71
    STORAGE = 74
    STOPPED = 75
    INTERRUPTED = 130


class ProjectError(Exception):
    """Something the user can act on; shown as one line without a traceback."""

    exit_code = ExitCode.CRASHED


class ConfigError(ProjectError):
    """A setting is unknown, out of range, or contradicts another."""

    exit_code = ExitCode.CONFIG


class DataError(ProjectError):
    """Text or prepared data cannot be used."""

    exit_code = ExitCode.DATA


class SourceError(DataError):
    """Input text is missing, empty, unreadable or malformed."""


class PreparedDataError(DataError):
    """A manifest or shard is missing or damaged."""


class CheckpointError(ProjectError):
    """A checkpoint is missing, damaged, or belongs to another run."""

    exit_code = ExitCode.CHECKPOINT


class GuardError(ProjectError):
    """Training stopped itself because a loss or gradient went bad."""

    exit_code = ExitCode.GUARD


class WorkerError(ProjectError):
    """A worker process was killed, most likely by the system for lack of memory."""

    exit_code = ExitCode.WORKER


class StorageError(ProjectError):
    """A file could not be written or read: no space, no permission, or a failing device."""

    exit_code = ExitCode.STORAGE


class StoppedBySignal(ProjectError):  # noqa: N818 - it is an outcome, and it reads as one where it is caught
    """A signal asked for a stop and the state was saved."""

    exit_code = ExitCode.STOPPED


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit status with which a command ends on `error`."""
    if isinstance(error, ProjectError):
        return error.exit_code
    if isinstance(error, OSError | UnusableFileError):
        return ExitCode.STORAGE
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.CRASHED
