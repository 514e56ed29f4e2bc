"""The errors that users see: one class for each decision that a user has to take, with the exit code that programs read.

    ProjectError
    ├── ConfigError        2   change a setting: it is unknown, out of range, or contradicts another
    ├── DataError          3
    │   ├── SourceError        look at the input text: missing, empty, unreadable or malformed
    │   └── PreparedDataError  prepare again: the manifest or a shard is missing or damaged
    ├── CheckpointError    4   choose another checkpoint or run: this checkpoint is missing, damaged or belongs to another run
    ├── GuardError         5   look at the run: training stopped itself because its numbers are bad, or because of an alert
    ├── WorkerError       71   give more memory or use fewer workers: a worker process was killed
    ├── StorageError      74   free space or give access: a file could not be written or read
    └── StoppedBySignal   75   nothing: run the same command again to continue

Every message says what was found, what was expected, where, and what to do.
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
    """The exit codes of all commands. docs/reference/exit-codes.md documents them, and they do not change."""

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
    """An error that the user can act on. It is shown as one line without a traceback."""

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
    """Training stopped itself: a loss, gradient or weight is bad, replicas differ, or an alert has the action `stop`."""

    exit_code = ExitCode.GUARD


class WorkerError(ProjectError):
    """A worker process was killed, most likely by the kernel for lack of memory."""

    exit_code = ExitCode.WORKER


class StorageError(ProjectError):
    """A file could not be written or read: no space, no permission, or a failing device."""

    exit_code = ExitCode.STORAGE


class StoppedBySignal(ProjectError):  # noqa: N818 - this is an outcome and not a fault
    """A signal asked for a stop and the state was saved."""

    exit_code = ExitCode.STOPPED


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the exit code of a command that ends with `error`."""
    if isinstance(error, ProjectError):
        return error.exit_code
    if isinstance(error, OSError | UnusableFileError):
        return ExitCode.STORAGE
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.CRASHED
