"""torchrun without its own tracebacks: the ranks have already said what was wrong, and a stop on request is no error.

Takes torchrun's arguments and PET_* variables, and like it returns 0 or 1, but 128 and a signal's number where that came before
there were ranks to tell. A rank that died in an unforeseen way (killed, crashed) is still reported in full.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser, run

from data_pipeline.errors import ExitCode
from trainer.watchdog import LAUNCHER_VARIABLE

EXPLAINED_BY_THE_RANK = set(ExitCode) - {ExitCode.DONE, ExitCode.CRASHED}
# What torchrun logs about a rank that ended and about a signal that it passes on: said better by the report and the entrypoint.
SAID_ELSEWHERE = ("failed (exitcode", "Sending process", "Received ")

__all__ = ["launch"]


def launch() -> int:
    """Runs torchrun; the exit code of this process."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    hold_sigterm_back_from_new_ranks()
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
            lambda record: not record.getMessage().startswith(SAID_ELSEWHERE)
        )
    parser = get_args_parser()
    parser.allow_abbrev = False  # else the trainer's own --run is refused as short for torchrun's --run-path
    try:
        run(parser.parse_args())
    except SignalException as error:
        return 128 + error.sigval if came_while_ranks_were_started(error) else 1
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in EXPLAINED_BY_THE_RANK:
            sys.stderr.write(f"{error}\n")
        return 1
    return 0


def came_while_ranks_were_started(error: SignalException) -> bool:
    """Whether torchrun did not know its ranks yet, and so told none of them; they end with this process, before they have begun."""
    return any(frame.name == "_start_workers" for frame in traceback.extract_tb(error.__traceback__))


def hold_sigterm_back_from_new_ranks() -> None:
    """Has the ranks be born with SIGTERM blocked, as this thread starts them: they unblock it once they can stop in order.

    A rank needs seconds to load, in which the signal would kill it and be taken for a crash. This process goes on to get its own:
    in another thread, from which Python hands it to this one.
    """
    threading.Thread(target=threading.Event().wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


if __name__ == "__main__":
    sys.exit(launch())
