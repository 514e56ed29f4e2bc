from __future__ import annotations

import atexit
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import pairwise
from textwrap import fill
from types import FrameType, TracebackType
from typing import NoReturn

from common.errors import ConfigError, ExitCode, ProjectError, StoppedBySignal, exit_code_of
from common.files import UnusableFileError
from common.redaction import RedactingFormatter, redacted
from common.storage_errors import TOO_MANY_FILES, explain_file_error, explain_os_error
from common.terminal import LineHandler, printable, printable_stdout, write_line

PROGRAM = "trainer"  # in suggested commands
_INDENT, _WIDTH = 14, 80
_STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@dataclass(frozen=True)
class Command:
    """A row in a table of commands. It only names its module, so that the table imports neither pydantic nor torch."""

    name: str
    summary: str
    module: str
    """It has `run(settings or options)`. It imports nothing slow, so that `--help` is fast; `run` imports what the work needs."""
    is_frequent: bool = False  # whether it is among the first in the list of commands of `trainer`
    renamed: str = ""  # its name in the program `trainer`, if that has another command of this name
    listens: bool = False  # whether it always listens on a socket; docs/security.md has a row for each


def list_of(commands: Mapping[str, Command]) -> str:
    indent = " " * _INDENT
    return "\n".join(
        fill(f"  {name:<{_INDENT - 2}}{command.summary}", _WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        for name, command in commands.items()
    )


def chosen(commands: Mapping[str, Command], program: str, words: Sequence[str]) -> tuple[Command, Sequence[str]] | None:
    """Return the named command and its arguments. None: the words ask for the list of commands, which is printed."""
    if not words or words[0] in ("help", "-h", "--help"):
        sys.stdout.write(f"usage: {program} COMMAND [--SETTING VALUE ...]\n\ncommands:\n{list_of(commands)}\n")
        return None
    if words[0] not in commands:
        raise ConfigError(f"{program}: {words[0]!r} is not a command; the commands are {', '.join(commands)}")
    return commands[words[0]], words[1:]


def command_text(name: str, *words: object) -> str:
    return shlex.join((PROGRAM, name, *map(str, words)))


def write_error(line: str) -> None:
    write_line(line, sys.stderr, "yellow" if line.startswith("stopped") else "red")


def log_to_stderr(package: str) -> None:
    logger, handler = logging.getLogger(package), LineHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


@contextmanager
def importing() -> Iterator[None]:
    """Turn every error of the imports within the context into a ConfigError: another start would fail at the same import."""
    try:
        yield
    except Exception as error:
        raise _too_many_files(error) or ConfigError(_not_loaded(error)) from error


def failed_import(error: BaseException, package: str) -> bool:
    """Return whether an import statement in a module of a package has failed, and not the work that follows it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "importlib" not in frame.f_code.co_filename]
    return any(
        str(one.f_globals.get("__name__")).startswith(f"{package}.") and other.f_code.co_name == "<module>"
        for one, other in pairwise(frames)
    )


@contextmanager
def stop_on_signals(advice: str = "finished work is kept: run the same command again to go on") -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into StoppedBySignal and Ctrl-C into KeyboardInterrupt, both with the advice.

    After the first they are ignored, for the clean-up. One that was ignored stays so (`nohup`). In other threads nothing changes.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for other in before.keys() - {signal.SIGINT}:
            signal.signal(other, signal.SIG_IGN)
        error = KeyboardInterrupt if number == signal.SIGINT else StoppedBySignal
        raise error(f"{signal.Signals(number).name} received; {advice}")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in _STOPS if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_command(
    main: Callable[[Sequence[str]], ExitCode | None],
    arguments: Sequence[str],
    announce: Callable[[str, ExitCode], object] | None = None,
) -> ExitCode:
    """Run `main(arguments)`. An error that users can act on becomes one line on stderr; any other error keeps its traceback.

    An error without a message is one that another process reports. `announce` gets line and exit code in place of stderr.
    """
    announce = announce or (lambda line, _code: write_error(line))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_traceback
    if isinstance(logging.lastResort, logging.Handler):  # shows the warnings of commands that do not configure logging
        logging.lastResort.setFormatter(RedactingFormatter())
    try:
        with printable_stdout():
            return main(arguments) or ExitCode.DONE
    except BrokenPipeError:  # the reader of the output, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except (ProjectError, OSError, UnusableFileError, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        message = redacted(explain_file_error(error) if isinstance(error, OSError | UnusableFileError) else str(error))
        if isinstance(error, KeyboardInterrupt):
            message = message or "interrupted with Ctrl-C"
        elif not isinstance(error, ProjectError):
            message = message or type(error).__name__
        if message:
            stopped = code in (ExitCode.STOPPED, ExitCode.INTERRUPTED)
            announce(printable(f"{'stopped' if stopped else 'error'}: {message}"), code)
        return code
    except Exception as error:
        limit = _too_many_files(error)
        if limit is None and not isinstance(error, ImportError | SyntaxError):
            raise
        reason, code = (_not_loaded(error), ExitCode.CONFIG) if limit is None else (explain_os_error(limit), ExitCode.STORAGE)
        announce(printable(f"error: {redacted(reason)}"), code)
        return code


def _too_many_files(error: BaseException | None) -> OSError | None:
    while error is not None:
        for number in TOO_MANY_FILES:
            if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None


def end_at_once(code: int) -> NoReturn:
    """Wait for threads, call what `atexit` knows, flush, and end without the teardown of the interpreter, which takes a second."""
    # also ends the idle threads of executors
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:  # the reader has closed the pipe
            pass
        except OSError:  # a full disk
            code = code or ExitCode.STORAGE
    os._exit(code)


def _not_loaded(error: Exception) -> str:
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
    """Print a traceback without secrets: libraries put URLs into their messages, with passwords and keys."""
    sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, place))))
