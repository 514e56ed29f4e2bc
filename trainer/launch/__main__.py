"""`python -m trainer.launch WORDS`: trains under torchrun, or runs another command; `entrypoints/train` says which.

It imports neither torch nor pydantic, so it starts at once.

Exit codes are those of `common.errors.ExitCode`. A group of ranks that ends in any other way (crash, out of memory, killed, ended
by the watchdog) is started again, from its newest checkpoint; see `trainer.launch.supervisor`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from common.command_line import end_at_once, run_command
from common.errors import ConfigError, ExitCode, PreparedDataError, ProjectError, StoppedBySignal
from data_pipeline.dataset.locks import reading
from trainer.launch.command import become, folder_of, group_command, num_ranks_command, other_command, training_arguments
from trainer.launch.environment import may_have_gpu, missing_variables
from trainer.launch.stop_request import StopRequest
from trainer.launch.supervisor import RESTART_VARIABLES, RestartPolicy, newest_step, run_group, supervise
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

__all__ = ["main"]


def main(words: Sequence[str]) -> ExitCode:
    """Trains, or becomes another command."""
    restarts = {name: os.environ.pop(name, "") for name in RESTART_VARIABLES}
    if command := other_command(words):
        become(command)
    arguments, stop = training_arguments(words), StopRequest()
    stop.install()
    cores = len(os.sched_getaffinity(0))
    os.environ.update(missing_variables(os.environ, partial(count_gpus, arguments, stop), cores))
    policy = RestartPolicy.of(restarts, os.environ.get("PET_NNODES") or "1")
    run, data = (folder_of(name, arguments, os.environ) for name in ("run", "data"))
    with exit_file() as reason, ExitStack() as held:
        if data:  # ranks hold their data only while they run, so it could be replaced in the pause before a restart
            with suppress(PreparedDataError):  # it is being replaced, which the ranks report
                held.enter_context(reading(Path(data)))
        os.environ[EXIT_FILE_VARIABLE] = str(reason)
        return supervise(
            partial(run_group, group_command(arguments), reason, stop),
            policy,
            partial(newest_step, run),
            stop,
            unseen="" if run else ", as far as is known without --run",
        )


def count_gpus(arguments: Sequence[str], stop: StopRequest) -> str:
    """The number of GPUs that this training uses, as text.

    Raises:
        ConfigError: torch cannot tell. The message is empty if the process that asked torch has written one.
        StoppedBySignal: a stop was requested meanwhile.
    """
    if not may_have_gpu():
        return "0"
    with subprocess.Popen(num_ranks_command(arguments), stdout=subprocess.PIPE, text=True) as asking, stop.passed_on_to(asking.pid):
        printed = asking.stdout.read() if asking.stdout else ""
    code = asking.returncode
    if stop.is_received():
        raise StoppedBySignal("")
    if code < 0:
        raise ProjectError(f"signal {-code} ended the process that counts the GPUs; start the training again")
    if code:
        advice = "torch cannot tell how many GPUs there are; install the packages of env/requirements.lock"
        raise ConfigError("" if code == ExitCode.CONFIG else advice)
    return printed.strip()


@contextmanager
def exit_file() -> Iterator[Path]:
    """The name of a file for the reason why the ranks end, in a folder that only this user can read and that is removed at the end.

    Raises:
        ConfigError: the folder cannot be created.
    """
    parent = os.environ.get("TMPDIR") or "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix="trainer.", dir=parent))
    except OSError as error:
        raise ConfigError(f"TMPDIR = {parent} must be a folder with room to write") from error
    try:
        yield folder / "exit"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    end_at_once(run_command(main, sys.argv[1:]))
