"""`python -m tests.support.command_server SOCKET` runs commands of the trainer for tests: `tests.support.runs` asks it to.

It imports the trainer once. Each process is forked from it, so it starts without the two seconds of CPU time that the imports take.
A connection is a request: a line of JSON, and the descriptors of stdin, stdout and stderr. The object has the words, whether they
are those of the program `trainer` or of `python -m trainer`, the folder, and the variables of each process. The answer is a line
with the pids, and another one with the exit code once all processes have ended. They are killed if the client leaves.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from trainer import program
from trainer.__main__ import start

MODULES = (
    "data_pipeline.__main__",
    "data_pipeline.dedup.leaks",
    "data_pipeline.prepare",
    "data_pipeline.repack",
    "data_pipeline.reports.terminal",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "trainer.commands.saved_model",
    "trainer.commands.train",
    "trainer.evaluation.evaluate",
    "trainer.inference.conversation",
    "trainer.inference.samples",
    "trainer.interop.export",
    "trainer.interop.formats.hf",
    "trainer.interop.formats.peft",
    "trainer.interop.import_model",
    "trainer.loop",
    "trainer.report.comparison",
    "trainer.report.pictures",
    "trainer.report.write",
    "trainer.search.search",
    "trainer.verification.audit",
    "trainer.verification.audit",
    "trainer.verification.verify",
)
_GRACE_S, _POLL_S = 5.0, 0.01


def serve(address: str) -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("up", flush=True)
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:  # it can be read once the test process has ended
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                _answer(connection)
            connection.close()
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> NoReturn:
    try:
        line, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 3)
        while not line.endswith(b"\n"):
            line += connection.recv(1 << 16)
        request = json.loads(line)
        pids = [_forked(request, variables, connection, descriptors) for variables in request["processes"]]
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(json.dumps(pids).encode() + b"\n")
        connection.sendall(b"%d\n" % _exit_code(pids, connection))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _forked(request: Mapping[str, Any], variables: Mapping[str, str], connection: socket.socket, descriptors: Sequence[int]) -> int:
    if pid := os.fork():
        return pid
    try:
        connection.close()
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(request["folder"])
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)  # those of the server may be files
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        os.setsid()
        if request["is_program"]:
            sys.argv = ["trainer", *request["words"]]
            program.main()
        start(request["words"])
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(127)


def _exit_code(pids: Sequence[int], connection: socket.socket) -> int:
    """Wait for the processes. If one fails, the others have a few seconds to end. Return the first exit code that is not 0."""
    code, left, deadline = 0, set(pids), math.inf
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        left.discard(pid)
        if pid and status and not code:
            code, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + _GRACE_S
        has_left = not pid and bool(select.select([connection], [], [], _POLL_S)[0])
        if has_left or time.monotonic() > deadline:
            for one in left:
                os.kill(one, signal.SIGKILL)
    return code


if __name__ == "__main__":
    serve(sys.argv[1])
