"""`python -m tests.support.command_server` runs commands of the trainer for tests: `tests.support.runs` asks it to.

It imports the trainer once. Each process is forked from it, so it starts without the two seconds of CPU time that the imports take.
A line of its input is a request: the words of a command, the variables of each process, and two files for the output. It answers
with a line that has the pids, and with another one that has the exit code once all processes have ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence

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
_GRACE_S = 5.0


def serve() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pids = [_forked(request["words"], variables, request["files"]) for variables in request["processes"]]
        print(json.dumps(pids), flush=True)
        print(_exit_code(pids), flush=True)


def _forked(words: Sequence[str], variables: Mapping[str, str], files: Sequence[str]) -> int:
    if pid := os.fork():
        return pid
    try:
        os.environ.clear()
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
        os.setsid()
        start(words)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    finally:
        os._exit(127)


def _exit_code(pids: Sequence[int]) -> int:
    """Wait for the processes. If one fails, the others have a few seconds to end. Return the first exit code that is not 0."""
    code, left = 0, set(pids)
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            deadline = time.monotonic() + _GRACE_S
            while left and time.monotonic() < deadline:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                left.discard(pid)
                time.sleep(0.01)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    return code


if __name__ == "__main__":
    serve()
