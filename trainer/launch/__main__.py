"""`python -m trainer.launch ARGUMENTS`: trains, or runs another command. It imports no torch or pydantic, to start at once."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from common.command_line import end_at_once, run_command
from common.errors import ConfigError, ExitCode, PreparedDataError, ProjectError, StorageError
from common.files import UnusableFileError, read_input
from common.hardware import num_cores, signs_of_gpus
from data_pipeline.dataset.locks import reading
from trainer.launch.command import become, folder_of, group_command, other_command, training_arguments
from trainer.launch.environment import missing_variables
from trainer.launch.stop_request import StopRequest
from trainer.launch.supervisor import RESTART_VARIABLES, RestartPolicy, newest_step, run_group, supervise
from trainer.runs.layout import RECORD
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

_MAX_RECORD_BYTES = 64 << 20


def main(words: Sequence[str]) -> ExitCode:
    restarts = {name: os.environ.pop(name, "") for name in RESTART_VARIABLES}
    if command := other_command(words):
        become(command)
    arguments, stop = training_arguments(words), StopRequest()
    run = folder_of("run", arguments, os.environ)
    if is_finished(run, arguments):
        return ExitCode.DONE
    stop.install()
    num_gpus = None if signs_of_gpus() else 0  # only torch knows their number, and the next process loads it
    os.environ.update(missing_variables(os.environ, num_gpus, num_cores()))
    policy = RestartPolicy.of(restarts, os.environ.get("PET_NNODES") or "1")
    data = folder_of("data", arguments, os.environ)
    with exit_file() as reason, ExitStack() as held:
        if data:  # ranks lock their data only while they run, and it must not be replaced in the pause before a restart
            with suppress(PreparedDataError):  # the data is being replaced; the ranks report this
                held.enter_context(reading(Path(data)))
        os.environ[EXIT_FILE_VARIABLE] = str(reason)
        code = supervise(
            partial(run_group, group_command(arguments), reason, stop),
            policy,
            partial(newest_step, run),
            stop,
            unseen="" if run else ", as far as is known without --run",
        )
    # Engines start a training with the code STOPPED again, so this code also means a SIGTERM before the first save.
    nothing_saved = run != "" and newest_step(run) < 0
    return ExitCode.INTERRUPTED if code is ExitCode.STOPPED and stop.is_interrupt() and nothing_saved else code


def is_finished(run: str, arguments: Sequence[str]) -> bool:
    """Return whether this start has nothing to train, after a report of that. Settings are read only if the record may say so."""
    try:
        if b'"status":"finished"' not in read_input(Path(run) / RECORD, _MAX_RECORD_BYTES).replace(b" ", b""):
            return False
    except (OSError, ValueError, UnusableFileError):
        return False
    from trainer.launch.finished import report_finished
    from trainer.launch.train_settings import load_train_settings

    with suppress(ProjectError):
        return report_finished(load_train_settings(arguments))
    return False


@contextmanager
def exit_file() -> Iterator[Path]:
    """Yield the path of the exit file: the first rank that fails, or the watchdog, writes there why the ranks end."""
    parent = os.environ.get("TMPDIR") or "/tmp"
    try:
        folder = tempfile.TemporaryDirectory(prefix="trainer.", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        kind = StorageError if error.errno in (errno.ENOSPC, errno.EDQUOT) else ConfigError
        raise kind(f"TMPDIR = {parent} must be a folder with free space that this user can write to") from error
    with folder as name:
        yield Path(name) / "exit"


if __name__ == "__main__":
    end_at_once(run_command(main, sys.argv[1:]))
