"""Starts training runs for tests, in this process or as torchrun would start them, and reads their output."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig
from trainer.distributed.network import STORE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
_END_S, _COMMAND_S = 60.0, 300.0
_PROGRAM = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = dict(words=sys.argv[1:], is_program=True, folder=os.getcwd(), processes=[dict(os.environ)])
    socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
    code = int(server.makefile().readlines()[-1])
sys.exit(code if code >= 0 else 128 - code)
"""


def tiny_config(data: Path, run: Path, /, **changes: Any) -> TrainConfig:
    """Return a configuration with two narrow layers, rows of 32 tokens and 12 steps of 8 rows, which trains in about a second.

    `changes` override single keys of a section.
    """
    settings: dict[str, Any] = {
        "data": data,
        "run": run,
        "threads": 1,
        "device": "cpu",
        "precision": "fp32",
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 32},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 3, "decay_steps": 12},
        "limits": {"steps": 12},
        "eval": {"every_steps": 4, "sample_tokens": 4},
        "checkpoint": {"every_steps": 5},
        "log": {"report": False, "hardware_every_s": 0},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    return TrainConfig(**settings)


def arguments(config: TrainConfig) -> list[str]:
    """Return the command line that sets this configuration."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    given = {name: value if isinstance(value, list) else [value] for name, value in flat.items() if value not in (None, [], {}, "")}
    return [
        word
        for name, values in given.items()
        for word in (f"--{name}", *(str(value).lower() if isinstance(value, bool) else str(value) for value in values))
    ]


class _CommandServer:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="command-server-")
        self.address = str(Path(self.folder.name, "socket"))
        command = [sys.executable, "-m", "tests.support.command_server", self.address]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"

    def start(self, words: Sequence[str], processes: Sequence[Mapping[str, str]], files: Sequence[Path]) -> Started:
        request = {"words": words, "is_program": False, "folder": str(ROOT), "processes": processes}
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.address)
        with Path(os.devnull).open() as empty, ExitStack() as stack:
            outputs = [stack.enter_context(file.open("ab")).fileno() for file in files]
            socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], [empty.fileno(), *outputs])
        return Started(connection)


class Started:
    """The processes of a command that the server has started."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._received = connection, b""
        self._pids: list[int] = json.loads(self._line(_END_S))

    def send_signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def wait(self, timeout: float) -> int:
        """Return the exit code of the process that failed first, or 0. TimeoutError: they needed longer, and were killed."""
        with self._connection:
            return int(self._line(timeout))

    def _line(self, timeout_s: float) -> bytes:
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._received:
            received = self._connection.recv(1 << 16)
            assert received, "the server of commands has failed; its error is on stderr"
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line


@cache
def _command_server() -> _CommandServer:
    return _CommandServer()


def start_ranks(config: TrainConfig, num_ranks: int, **environment: str) -> Started:
    """Start `train` on these ranks, without a launcher. The output goes to `<run>.log` next to the run."""
    server = _command_server()
    store = tempfile.mkdtemp(dir=server.folder.name)
    shared = os.environ | {"OMP_NUM_THREADS": "1", STORE_VARIABLE: store} | environment
    numbers = {"WORLD_SIZE": f"{num_ranks}", "LOCAL_WORLD_SIZE": f"{num_ranks}", "GROUP_RANK": "0"}
    ranks = [shared | numbers | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(num_ranks)]
    log = config.run.with_suffix(".log")
    return server.start(["train", *arguments(config)], ranks, (log, log))


def start_torchrun(config: TrainConfig, num_ranks: int, **environment: str) -> subprocess.Popen[str]:
    """Start `train` under torchrun. The output goes to `<run>.log` next to the run."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", "--"),
        *("trainer", "train", *arguments(config)),
    ]
    with config.run.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m <words>` to its end, with its output captured. Commands of the trainer are forked from the server."""
    command, variables = [sys.executable, "-m", *words], os.environ | environment
    at_start = any(name.startswith("PYTHON") for name in environment)  # has an effect when Python starts
    if words[0] != "trainer" or at_start:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_COMMAND_S, env=variables)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        code = _command_server().start(words[1:], [variables], files).wait(_COMMAND_S)
        return subprocess.CompletedProcess(command, code, *(file.read_text() for file in files))


def write_program(path: Path) -> None:
    """Write an executable that does what the program `trainer` does, in a process that the server has forked."""
    path.write_text(_PROGRAM.format(python=sys.executable, address=_command_server().address))
    path.chmod(0o755)


def metrics(run: Path, *events: str) -> list[dict[str, Any]]:
    """Return the events of these kinds in the metrics of a run, in the order of the file."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [parsed for line in lines if (parsed := json.loads(line))["event"] in events]


def losses(run: Path) -> list[tuple[int, str]]:
    """Return step and exact loss (in hexadecimal) of every training step."""
    return [(event["step"], event["loss_hex"]) for event in metrics(run, "train")]


def wait_for_step(run: Path, step: int, timeout_s: float = 120) -> None:
    """Wait until the metrics of a run have reached a step."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and any(f'"event": "train", "step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run} did not reach step {step} in {timeout_s} s; see {run.with_suffix('.log')}")
