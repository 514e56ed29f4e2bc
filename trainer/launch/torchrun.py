"""Starts the ranks of this node: `python -m trainer.launch.torchrun [torchrun's options] -m trainer train [options]`.

`trainer.launch` runs it.

Settings are checked before torch is loaded. If torch cannot be loaded, the error is one line.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from common.command_line import end_at_once, importing, run_command
from common.errors import ExitCode
from trainer.launch.notices import say
from trainer.launch.settings import check_variables

__all__ = ["main"]


def main(arguments: Sequence[str]) -> ExitCode:
    """Start the ranks, wait for them, and return the exit code of this process."""
    check_variables(os.environ)
    if (place := _place_of_training(arguments)) is not None:
        with importing():
            from trainer.launch.train_settings import load_train_settings
        load_train_settings(arguments[place:])
        say(f"starting ranks: {os.environ.get('PET_NPROC_PER_NODE', '1')}; loading PyTorch first, which takes seconds to a minute")
    with importing():
        from trainer.launch.agent import launch
    return launch(arguments)


def _place_of_training(arguments: Sequence[str]) -> int | None:
    """Return the place of the first option of the training; None if the ranks run another program."""
    words = ("-m", "trainer", "train")
    places = (place + len(words) for place in range(len(arguments)) if tuple(arguments[place : place + len(words)]) == words)
    return next(places, None)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # SIGINT ends this process, like SIGTERM, until ranks run that can save
    end_at_once(run_command(main, sys.argv[1:]))
