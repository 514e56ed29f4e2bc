"""torchrun's agent on this node: it starts the ranks, passes stop requests on to them, and returns their exit code.

A single node needs no rendezvous over the network. torchrun would open one to the whole network, and unpickle data that anybody
sends. Here the store of a single node is in the memory of this process, and its ranks find each other through a directory that
only their user can read. Variables and arguments for the address of the rendezvous then have no effect.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher_api
from torch.distributed.run import get_args_parser, parse_min_max_nnodes, run

from common.command_line import write_error
from common.errors import ConfigError, ExitCode
from common.hardware import num_oom_kills
from trainer.distributed.network import STORE_VARIABLE
from trainer.launch.ranks import Failure, exit_code_after, private_folder
from trainer.launch.stop_request import STOP_SIGNALS, log_line
from trainer.watchdog.processes import LAUNCHER_VARIABLE

# Log messages of torchrun about a rank that ended, a signal that it passes on, and a node that left first. They are suppressed,
# because the launcher reports the same in plainer words.
SUPPRESSED = ("failed (exitcode", "Sending process", "Received ", "Error waiting on exit barrier")
OTHER_NODES_S = 30.0  # a node that is done waits this long for the others, which need its store

NOTICED_S = 3.0  # ranks that have joined a group notice within this time that the first node has ended, and say so

ALONE = "alone"  # name of the rendezvous of a single node

STATIC = "static"  # torchrun's rendezvous at PET_MASTER_ADDR; the first node serves its store until it ends


class Alone(StaticTCPRendezvous):
    """The rendezvous of a single node. Its store is in the memory of this process."""

    def get_backend(self) -> str:
        return ALONE

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        # the port is 0, because there is no store that the ranks could connect to
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("localhost", 0))


class Agent(LocalElasticAgent):
    """torchrun's agent, except that a signal only asks the ranks to stop, and the agent keeps watching them.

    torch's agent leaves its loop at a signal. A third signal ends its wait for the ranks, which then die before they have saved.
    The other nodes wait 300 s for an agent that has left its loop, once their ranks are done.
    """

    has_started: ClassVar[bool] = False  # whether the ranks were started at least once

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings | {"exit_barrier_timeout": OTHER_NODES_S})
        self._asked = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        Agent.has_started = True
        started: dict[int, Any] = super()._start_workers(worker_group)
        group: Any = worker_group  # torch declares its address as None
        if group.group_rank and group.spec.rdzv_handler.get_backend() == STATIC:
            address = group.master_addr, group.master_port
            threading.Thread(target=self._end_after, args=address, name="first-node", daemon=True).start()
        for number in STOP_SIGNALS:
            signal.signal(number, self._ask_ranks)
        return started

    def _end_after(self, first_node: str, port: int) -> None:
        """End the ranks if the first node's torchrun has ended: a node that is started meanwhile would wait for another store."""
        wait_for_end(first_node, port, NOTICED_S)
        if not self._asked:  # else the ranks stop in order, and `_ask_ranks` limits their time
            log_line("the torchrun of the first node has ended, so the ranks of this node are ended")
            self._send(signal.SIGKILL)

    def _ask_ranks(self, _number: int, _frame: FrameType | None) -> None:
        """Send SIGTERM to the ranks for every stop signal, because they do not handle the others; later SIGKILL."""
        self._send(signal.SIGTERM)
        if not self._asked:
            self._asked = True
            late = threading.Timer(self._shutdown_timeout, self._send, [signal.SIGKILL])
            late.daemon = True
            late.start()

    def _send(self, number: signal.Signals) -> None:
        for rank in () if self._pcontext is None else self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.killpg(rank, number)


def launch(arguments: Sequence[str]) -> ExitCode:
    """Return the exit code that the first failed rank chose, STOPPED, or CRASHED. ConfigError: torchrun refuses a setting."""
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    # New ranks inherit the mask of this thread. This process receives the signals in another thread.
    threading.Thread(target=threading.Event().wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    vars(launcher_api).update(LocalElasticAgent=Agent)
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(
            lambda record: not record.getMessage().startswith(SUPPRESSED)
        )
    parser = get_args_parser()
    parser.allow_abbrev = False  # else argparse takes the trainer's --run as short for torchrun's --run-path
    options = parser.parse_args(arguments)
    os.environ.pop(STORE_VARIABLE, None)
    oom_kills = num_oom_kills()
    try:
        if parse_min_max_nnodes(options.nnodes)[1] == 1:
            rendezvous_handler_registry.register(ALONE, lambda chosen: Alone("localhost", 0, 0, 1, chosen.run_id, 0))
            vars(options).update(standalone=False, rdzv_backend=ALONE, rdzv_endpoint=ALONE, node_rank=0)
            with private_folder() as os.environ[STORE_VARIABLE]:
                run(options)  # type: ignore[no-untyped-call]
        else:
            run(options)  # type: ignore[no-untyped-call]
    except SignalException:  # no rank runs yet; those that are being started end with this process
        return ExitCode.STOPPED
    except ChildFailedError as error:
        failures = {rank: Failure(each.pid, each.exitcode, each.timestamp) for rank, each in error.failures.items()}
        return exit_code_after(failures, oom_kills)
    except (DistNetworkError, DistStoreError, RendezvousError) as error:
        if Agent.has_started:
            raise
        endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".") or type(error).__name__
        trouble = f"the nodes did not meet ({reason}); `trainer doctor` on this node checks the address and the port"
        if "EADDRINUSE" in str(error):
            trouble = (
                "another program uses this port of the first node, so the nodes cannot meet there; end that program "
                "(ss -ltnp shows it), or set PET_MASTER_PORT to another port on all nodes"
            )
        write_error(f"error: {endpoint}: {trouble}")
        return ExitCode.CRASHED
    except (ValueError, AssertionError) as error:
        if Agent.has_started:
            raise
        found = str(error) or "an assertion about its settings failed"
        raise ConfigError(f"torchrun refuses its settings ({found}); correct the PET_* variable and start again") from error
    return ExitCode.DONE


def wait_for_end(host: str, port: int, absent_s: float) -> None:
    """Wait until the process that listens on a port has ended, and `absent_s` seconds longer.

    A connection that the other side closes in order has ended with its process, which may have a successor on the same port. One
    that is reset, or cannot be made, says something about the network alone, so it is made again. If nothing listens for
    `absent_s` seconds, the process has ended too.
    """
    absent_since: float | None = None
    while absent_since is None or time.monotonic() < absent_since + absent_s:
        try:
            with socket.create_connection((host, port)) as connection:
                absent_since = None
                connection.settimeout(None)
                while connection.recv(1024):
                    pass
            time.sleep(absent_s)
            return
        except ConnectionRefusedError:
            absent_since = absent_since or time.monotonic()
        except OSError:
            absent_since = None
        time.sleep(min(0.2, absent_s))
