"""torchrun without its own tracebacks: the ranks have already said what was wrong, and a stop on request is no error.

Takes torchrun's arguments and PET_* variables, and like it returns 0 or 1, but 128 and a signal's number where that came before
there were ranks to tell. A rank that died in an unforeseen way (killed, crashed) is still reported in full.

One node alone needs no rendezvous. torchrun would open one to the whole network, and unpickle what anybody writes there. Here the
store of such a node is the memory of this process, and its ranks find each other in a directory that only their user can read.
Variables and arguments that say where nodes meet have no effect then.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import get_args_parser, parse_min_max_nnodes, run

from data_pipeline.errors import ExitCode
from trainer.network import STORE_VARIABLE
from trainer.watchdog import EXIT_FILE_VARIABLE, LAUNCHER_VARIABLE

EXPLAINED_BY_THE_RANK = set(ExitCode) - {ExitCode.DONE, ExitCode.CRASHED}
# What torchrun logs about a rank that ended and about a signal that it passes on: said better by the report and the entrypoint.
SAID_ELSEWHERE = ("failed (exitcode", "Sending process", "Received ")

ALONE = "alone"
"""The rendezvous of a node that is the only one."""

__all__ = ["Alone", "launch"]


class Alone(RendezvousHandler):
    """The rendezvous of the only node: it is the first of one, and its store is in the memory of this process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        """The name under which it is registered."""
        return ALONE

    def next_rendezvous(self) -> RendezvousInfo:
        """At once. The ranks are given port 0, as there is no store for them to connect to."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nobody has to know."""

    def num_nodes_waiting(self) -> int:
        """None ever comes."""
        return 0

    def get_run_id(self) -> str:
        """As torchrun was given it."""
        return self._run_id

    def shutdown(self) -> bool:
        """There is nothing to close."""
        return True


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
    arguments = parser.parse_args()
    os.environ.pop(STORE_VARIABLE, None)
    try:
        if parse_min_max_nnodes(arguments.nnodes)[1] == 1:
            rendezvous_handler_registry.register(ALONE, Alone)
            vars(arguments).update(standalone=False, rdzv_backend=ALONE, rdzv_endpoint=ALONE, node_rank=0)
            with private_folder() as os.environ[STORE_VARIABLE]:
                run(arguments)  # type: ignore[no-untyped-call]
        else:
            run(arguments)  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval if came_while_ranks_were_started(error) else 1
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode not in EXPLAINED_BY_THE_RANK:
            sys.stderr.write(f"{error}\n")
        return 1
    return 0


@contextmanager
def private_folder() -> Iterator[str]:
    """A directory for this user alone, while the context lasts. If this process is killed, it goes with the exit file beside it."""
    exit_file = os.environ.get(EXIT_FILE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=Path(exit_file).parent if exit_file else None) as name:
        yield name


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
