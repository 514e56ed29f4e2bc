"""Run by `python -m trainer.launch.torchrun`: checks the settings before torch is loaded, and starts the ranks of this node."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.command_line import end_at_once, importing, run_command
from common.errors import ExitCode
from common.hardware import num_cores, signs_of_gpus
from trainer.launch.environment import SHUTDOWN_S, check_variables, missing_variables
from trainer.launch.ranks import is_alone, launch_here
from trainer.launch.stop_request import log_line
from trainer.watchdog.processes import EXIT_FILE_VARIABLE

_TAKES = "takes seconds to a minute"


def main(arguments: Sequence[str]) -> ExitCode:
    check_variables(os.environ)
    words = ("-m", "trainer", "train")
    places = (place + len(words) for place in range(len(arguments)) if tuple(arguments[place : place + len(words)]) == words)
    if (place := next(places, None)) is not None:  # otherwise the ranks run another program
        with importing():
            from trainer.launch.train_settings import hand_to_ranks, load_train_settings
        config = load_train_settings(arguments[place:])
        if not os.environ.get("PET_NPROC_PER_NODE"):
            os.environ.update(missing_variables(os.environ, count_gpus(config.device), num_cores()))
            check_variables(os.environ)
            config = load_train_settings(arguments[place:])  # the recipe `auto` depends on the number of ranks
        exit_file = os.environ.get(EXIT_FILE_VARIABLE)  # it is in a private folder
        if exit_file and knows_ranks(os.environ):
            hand_to_ranks(config, arguments[place:], Path(exit_file).with_name("settings.json"))
        loading = "" if "torch" in sys.modules else f"; loading PyTorch first, which {_TAKES}"
        log_line(f"starting ranks: {os.environ['PET_NPROC_PER_NODE']}{loading}")
    if is_alone(arguments, os.environ):
        shutdown_s = float(os.environ.get("PET_SHUTDOWN_TIMEOUT") or SHUTDOWN_S)
        return launch_here(arguments, int(os.environ["PET_NPROC_PER_NODE"]), shutdown_s)
    with importing():
        from trainer.launch.agent import launch
    return launch(arguments)


def knows_ranks(variables: Mapping[str, str]) -> bool:
    """Return whether the variables give the number of ranks, on which the recipe `auto` depends. Otherwise torchrun decides it."""
    return variables["PET_NPROC_PER_NODE"].isdecimal() and (variables.get("PET_NNODES") or "1").isdecimal()


def count_gpus(device: str) -> int:
    if device == "cpu" or not signs_of_gpus():
        return 0
    log_line(f"counting the GPUs; loading PyTorch for it {_TAKES}")
    with importing():
        from trainer.distributed.devices import num_gpus
    return num_gpus(device)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT ends this process, like SIGTERM, until ranks run that can save
    end_at_once(run_command(main, sys.argv[1:]))
