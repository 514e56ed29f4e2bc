"""The frame of every command: one function is called, and its errors become exit codes."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from types import TracebackType
from typing import NoReturn

from common.errors import ConfigError, ExitCode, ProjectError, exit_code_of
from common.files import UnusableFileError
from common.redaction import RedactingFormatter, redacted
from common.storage_errors import explain_file_error
from common.terminal import printable, printable_stdout

__all__ = ["Command", "end_at_once", "importing", "run_command"]


@dataclass(frozen=True)
class Command:
    """A command in a table of commands. It names its parts, so that the table loads neither pydantic nor torch."""

    name: str
    summary: str
    """Its line in the list of commands."""
    settings: str
    """`package.module:Class`, a model of `Settings` or `Options`. Its module loads nothing heavy, so `--help` is fast."""
    work: str
    """`package.module:function`, which is called with the settings. It is loaded after they are checked."""
    description: str = ""
    """The first sentence of its help; empty: the first paragraph of the docstring of `settings`."""
    arguments: str = ""
    """The rest of its command line, for a list of commands that shows it."""


@contextmanager
def importing() -> Iterator[None]:
    """Around imports that need installed packages. A launcher starts a crashed training again, which would not help here.

    Raises:
        ConfigError: an import failed, in whatever way; another start would fail in the same way.
    """
    try:
        yield
    except Exception as error:
        raise ConfigError(_not_loaded(error)) from error


def run_command(
    main: Callable[[Sequence[str]], ExitCode | None],
    arguments: Sequence[str],
    announce: Callable[[str, ExitCode], None] | None = None,
) -> ExitCode:
    """Runs `main(arguments)`; an error that users can act on becomes one line on stderr, any other keeps its traceback.

    Returns what `main` returns, DONE for None. A module that is missing or broken is an error of the installation, with the code
    of ConfigError.

    An error without a message is one that another process of the same command reports. `announce` replaces the printing. What the
    terminal's encoding cannot show is printed as an escape. What would steer a terminal is named, in error lines everywhere, as
    logs are shown on terminals later, and in output that goes to one now.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    if isinstance(logging.lastResort, logging.Handler):  # commands that set no logging up show their warnings through it
        logging.lastResort.setFormatter(RedactingFormatter())
    try:
        with printable_stdout():
            return main(arguments) or ExitCode.DONE
    except BrokenPipeError:  # whoever read the output, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except (ImportError, SyntaxError) as error:
        (announce or _print)(printable(f"error: {redacted(_not_loaded(error))}"), ExitCode.CONFIG)
        return ExitCode.CONFIG
    except (ProjectError, OSError, UnusableFileError, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        told = explain_file_error(error) if isinstance(error, OSError | UnusableFileError) else str(error)
        message = redacted(told) or ("" if isinstance(error, ProjectError) else type(error).__name__)
        if message:
            (announce or _print)(printable(f"{'stopped' if code == ExitCode.STOPPED else 'error'}: {message}"), code)
        return code


def end_at_once(code: int) -> NoReturn:
    """Ends this process with an exit code, without the interpreter's teardown, which takes seconds once torch is loaded.

    What was registered with `atexit` is called, and the streams are flushed. Where a thread that is no daemon runs still, the
    interpreter ends in its own way, and so waits for it.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # nobody reads it any more
            pass
        except OSError:  # a full disk
            code = code or ExitCode.STORAGE
    os._exit(code)


def _not_loaded(error: Exception) -> str:
    """An import that failed: with what, where, and what to do."""
    if isinstance(error, SyntaxError):
        what, place = error.msg, f"{error.filename}, line {error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        last = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")][-1]
        what, place = str(error), f"{last.filename}, line {last.lineno}"
    return (
        f"a module cannot be loaded: {type(error).__name__}: {what} ({place}); install the packages of env/requirements.lock, "
        "or correct the file"
    )


def _print_traceback(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Libraries put addresses into their messages as they were given, with passwords and keys."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, place))))


def _print(line: str, _code: ExitCode) -> None:
    print(line, file=sys.stderr)  # noqa: T201
