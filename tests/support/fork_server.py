"""The server from which tests fork processes that have the modules of the trainer, so that each starts in a tenth of a second."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_MODULES = (
    "data_pipeline.prepare",
    "hypothesis",
    "pytest",
    "tests.support.shown",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "trainer.commands.saved_model",
    "trainer.compression.comparison",
    "trainer.interop.export",
    "trainer.interop.import_model",
    "trainer.loop",
    "trainer.runs.untrained",
)
_started: set[int] = set()


def forking() -> ForkServerContext:
    """Return a context whose processes are forked from a server with these modules.

    A process has one server. That of a preparation lacks torch, which takes each process seconds to import, so it is replaced.
    """
    context, server = multiprocessing.get_context("forkserver"), forkserver._forkserver
    if server._forkserver_pid not in _started:
        server._stop()
        context.set_forkserver_preload(list(_MODULES))
        server.ensure_running()
        _started.add(server._forkserver_pid)
    return context
