"""Shows only the first error of a failure: not the lost connections of other ranks, and no error twice."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from common.errors import ExitCode, ProjectError
from trainer.watchdog.processes import EXIT_FILE_VARIABLE, is_running

LOST_RANK = "lost its connection to another rank"  # part of the error of a rank if another rank has ended without a reason

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
_LIBRARIES = ("gloo", "NCCL", "Gloo")
_POLL_S = 0.02
_LONGEST_UNWINDING_S = 10.0  # the longest wait for the reason of a rank; a killed one leaves none


class ExplainedElsewhereError(ProjectError):
    """Another rank has reported why the run ends, or a line was already printed."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__("")
        self.exit_code = code


@contextmanager
def only_first_failure() -> Iterator[None]:
    """Suppress the traceback of a connection that ended with another rank. One line is printed if that rank left no reason."""
    before, threading.excepthook = threading.excepthook, _print_unless_kept
    try:
        yield
    except RuntimeError as error:
        if "RANK" not in os.environ or not (lost := lost_connection(error)):
            raise
        if (code := _reason_of_others(os.environ)) is not None:
            raise ExplainedElsewhereError(code) from None
        rank = os.environ["RANK"]
        sys.stderr.write(f"error: rank {rank} {LOST_RANK} ({lost}), which has ended; the message about that rank has the reason\n")
        raise ExplainedElsewhereError(ExitCode.CRASHED) from None
    finally:
        threading.excepthook = before


def _print_unless_kept(arguments: threading.ExceptHookArgs) -> None:
    """Print the error of a thread, except of TensorBoard's writing thread: it keeps its error for the next call of the writer."""
    if getattr(arguments.thread, "exception", None) is not arguments.exc_value:
        threading.__excepthook__(arguments)


def lost_connection(error: BaseException | None) -> str | None:
    """Return the words of a communication library about a lost connection; None for any other error."""
    while error is not None:
        text = str(error)
        if any(name in text for name in _LIBRARIES) and (lost := next((words for words in _LOST if words in text), None)):
            return lost
        error = error.__cause__ or error.__context__
    return None


def _reason_of_others(variables: Mapping[str, str]) -> ExitCode | None:
    """Wait for the exit code that another rank of this node writes; None if it left none, or if all ranks of this node wait."""
    if not (name := variables.get(EXIT_FILE_VARIABLE)):
        return None
    path, ranks = Path(name), int(variables.get("LOCAL_WORLD_SIZE", "1"))
    waiting = f"{path.name}.waiting-{os.getppid()}-"  # with the process of torchrun, which is another one after a restart
    with suppress(OSError):
        path.with_name(f"{waiting}{variables['RANK']}").touch()
    deadline = time.monotonic() + _LONGEST_UNWINDING_S
    while True:
        # Counted before the file is read, because a rank writes its reason before it ends.
        none_comes = _num_ranks_here() < ranks or len(list(path.parent.glob(f"{waiting}*"))) >= ranks
        with suppress(OSError, ValueError, IndexError):
            return ExitCode(int(path.read_text().split()[0]))
        if none_comes or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)


def _num_ranks_here() -> int:
    parent = os.getppid()
    children = [pid for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]
    return sum(is_running(int(pid)) for pid in children)
