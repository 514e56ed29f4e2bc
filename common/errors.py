"""The errors that users see: one class for each decision that a user has to take, with the exit code that programs read.

    ProjectError
    ├── ConfigError            change a setting
    ├── DataError
    │   ├── SourceError        look at the input text
    │   └── PreparedDataError  prepare again
    ├── CheckpointError        choose another checkpoint or run
    ├── GuardError             look at the run
    ├── WorkerError            give more memory or use fewer workers
    ├── StorageError           free space or give access
    └── StoppedBySignal        nothing: run the same command again to continue

Every message says what was found, what was expected, where, and what to do.
"""

from __future__ import annotations

from enum import Enum, IntEnum, auto
from typing import Self

from common.files import UnusableFileError


class NextStart(Enum):
    NOTHING = auto()
    MAY_SUCCEED = auto()  # the launcher and the engines of env/deploy start it again
    CONTINUES = auto()  # the engines start it again, without a limit where they can
    USELESS = auto()  # it would end the same way, or the user does not want it


class ExitCode(IntEnum):
    """The exit codes of all commands. They do not change. docs/reference/exit-codes.md is made from them."""

    next_start: NextStart
    meaning: str

    def __new__(cls, number: int, next_start: NextStart = NextStart.USELESS, meaning: str = "") -> Self:
        code = int.__new__(cls, number)
        code._value_, code.next_start, code.meaning = number, next_start, meaning
        return code

    DONE = 0, NextStart.NOTHING, "done"
    CRASHED = 1, NextStart.MAY_SUCCEED, "a crash or a stall that happened again after all restarts"
    CONFIG = 2, NextStart.USELESS, "a setting is unknown, out of range, or contradicts another"
    DATA = 3, NextStart.USELESS, "text or prepared data cannot be used"
    CHECKPOINT = 4, NextStart.USELESS, "a checkpoint is missing, damaged, or belongs to another run"
    GUARD = 5, NextStart.USELESS, "the training stopped itself, because its numbers are bad or an alert has the action `stop`"
    WORKER = 71, NextStart.MAY_SUCCEED, "a worker process was killed, most likely because memory ran out"
    STORAGE = 74, NextStart.USELESS, "a file could not be written or read: no space, no permission, or a failing device"
    STOPPED = (
        75,
        NextStart.CONTINUES,
        "stopped by a signal: the state is saved, or a signal other than Ctrl-C came before there was a state. Run the same "
        "command again to go on",
    )
    INTERRUPTED = (
        130,
        NextStart.USELESS,
        "interrupted (Ctrl-C): the next `prepare` resumes from there. `trainer train` ends with 130 if nothing was saved yet",
    )


class ProjectError(Exception):
    """An error that the user can act on. It is shown as one line without a traceback."""

    exit_code = ExitCode.CRASHED


class ConfigError(ProjectError):
    exit_code = ExitCode.CONFIG


class DataError(ProjectError):
    exit_code = ExitCode.DATA


class SourceError(DataError):
    """Input text is missing, empty, unreadable or malformed."""


class PreparedDataError(DataError):
    """A manifest or shard is missing or damaged."""


class CheckpointError(ProjectError):
    exit_code = ExitCode.CHECKPOINT


class GuardError(ProjectError):
    exit_code = ExitCode.GUARD


class WorkerError(ProjectError):
    exit_code = ExitCode.WORKER


class StorageError(ProjectError):
    exit_code = ExitCode.STORAGE


class StoppedBySignal(ProjectError):  # noqa: N818 - this is an outcome and not a fault
    exit_code = ExitCode.STOPPED


def exit_code_of(error: BaseException) -> ExitCode:
    if isinstance(error, ProjectError):
        return error.exit_code
    if isinstance(error, OSError | UnusableFileError):
        return ExitCode.STORAGE
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.CRASHED
