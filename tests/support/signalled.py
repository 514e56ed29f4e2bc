"""A run of two ranks, on one node or two, of which one process gets a signal. Checks exit codes, output and saved state.

A node is a launcher (`entrypoints/train`) with torchrun, its ranks and their watchdog. Two nodes meet over loopback, as two
machines would over their network.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from common.errors import ExitCode
from tests.support.runs import ROOT, arguments, metrics
from tests.support.two_ranks import all_ended, command_line, descendants, launcher_of, ranks_of, seconds_until
from trainer.checkpoint.store import CheckpointStore
from trainer.config import TrainConfig

Member = Literal["launcher", "torchrun", "rank", "watchdog", "process group", "node"]
"""The receiver of the signal. `process group`: the group of the launcher, as with Ctrl-C in a terminal. `node`: every process of a
node, as with Slurm's `scancel`."""
Phase = Literal["loading", "training", "ending"]
"""The time of the signal: before the first step, between or in two steps, or after the last step was reported."""

ENDLESS = 100_000
"""Number of steps of a run that only a signal ends."""
_STOPS = (signal.SIGTERM, signal.SIGINT)
_ASKED: tuple[Member, ...] = ("launcher", "torchrun", "rank", "process group", "node")
_KILLED: tuple[Member, ...] = ("launcher", "torchrun", "rank")
_PHASES: tuple[Phase, ...] = ("loading", "training", "ending")
_SPAN_S: dict[Phase, float] = {"training": 0.3, "ending": 0.4}
_LONG_S = 120.0


@dataclass(frozen=True)
class Case:
    """One cell of the table of exit codes."""

    num_nodes: int
    member: Member
    number: signal.Signals
    phase: Phase

    @property
    def asks(self) -> bool:
        """Whether the signal asks the run to save and stop."""
        return self.number in _STOPS and self.member != "watchdog"

    @property
    def endless(self) -> bool:
        """Whether only the signal ends the run. In such a run a lost signal is noticed."""
        return self.asks and self.phase != "ending"

    def __str__(self) -> str:
        return f"{self.number.name} to the {self.member}, {self.phase}, {self.num_nodes} node{'s' * (self.num_nodes > 1)}"


def cases() -> list[Case]:
    """Return all cells of the table. A node killed before two nodes have met is left out, because the other node waits for it."""
    found = []
    for num_nodes in (1, 2):
        for phase in _PHASES:
            found += [Case(num_nodes, member, number, phase) for member in _ASKED for number in _STOPS]
            if num_nodes == 1 or phase != "loading":
                found += [Case(num_nodes, member, signal.SIGKILL, phase) for member in _KILLED]
            if phase == "training":
                found += [Case(num_nodes, "watchdog", number, phase) for number in (*_STOPS, signal.SIGKILL)]
    return found


@dataclass(frozen=True)
class Place:
    """Where a node is started, if it differs from the other nodes."""

    config: TrainConfig | None = None
    """Its settings; None: those of the first node."""
    command: tuple[str, ...] = ()
    """The command that runs the launcher, such as `ip netns exec NAME`."""
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Nodes:
    """The launchers of a run. Each writes to `<run>-<node>.log` next to the run."""

    config: TrainConfig
    starts: list[Callable[[], subprocess.Popen[bytes]]]
    launchers: list[subprocess.Popen[bytes]] = field(init=False)
    struck_node: int = 0

    def __post_init__(self) -> None:
        self.launchers = [start() for start in self.starts]

    def start_again(self, node: int) -> None:
        """Start a node whose processes have all ended, as a scheduler does."""
        self.launchers[node] = self.starts[node]()

    def log(self, node: int) -> str:
        """Return the output of a node."""
        return _log_file(self.config, node).read_text()

    def members(self, node: int, member: Member, draw: random.Random) -> list[int]:
        """Return the running processes of a node that get the signal."""
        launcher = self.launchers[node].pid
        torchrun, ranks = launcher_of(launcher), ranks_of(launcher)
        if member == "torchrun":
            return [] if torchrun is None else [torchrun]
        if member == "rank":
            return [draw.choice(ranks)] if ranks else []
        if member == "watchdog":
            return [pid for pid in descendants(launcher) if b"watchdog/__main__.py" in command_line(pid)]
        return [*descendants(launcher), launcher] if member == "node" else [launcher]

    def reported(self) -> int:
        """Return the newest step in the metrics."""
        try:
            return max((event["step"] for event in metrics(self.config.run, "train")), default=0)
        except (OSError, ValueError):  # the file is missing or ends in half a line
            return 0

    def over(self) -> bool:
        """Return whether a launcher has ended."""
        return any(launcher.poll() is not None for launcher in self.launchers)

    def weights(self) -> str:
        """Return the last line of a finished run, with the digest of its weights. Empty if it has not finished."""
        return ["", *(line for line in self.log(0).splitlines() if line.startswith("weights sha256:"))][-1]


@contextmanager
def running(config: TrainConfig, num_nodes: int, *, places: Sequence[Place] = (), **environment: str) -> Iterator[Nodes]:
    """Start a run, and kill all of its processes at the end of the block. Node i is started in `places[i]`."""
    starts = []
    for node, variables in enumerate(_variables(num_nodes)):
        place = places[node] if places else Place()
        command = [*place.command, *_command(place.config or config)]
        starts.append(partial(_started, command, _log_file(config, node), variables | place.variables | environment))
    nodes = Nodes(config, list(starts))
    try:
        yield nodes
    finally:
        everything = [pid for launcher in nodes.launchers for pid in (launcher.pid, *descendants(launcher.pid))]
        for pid in everything:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in nodes.launchers:
            launcher.wait()


@dataclass(frozen=True)
class Outcome:
    """The end of a run after a signal."""

    codes: list[int]
    """Exit code of each node; -N if signal N ended the launcher."""
    seconds: float
    """Seconds from the signal until all processes of the run had ended."""
    too_late: bool
    """True if no process was left to get the signal."""


def struck(nodes: Nodes, case: Case, draw: random.Random, load_s: float) -> Outcome:
    """Send the signal of a case at a random moment of its phase, and wait for the end of the run.

    Args:
        nodes: the run, just started.
        case: receiver, signal and phase.
        draw: chooses the node, the rank and the moment.
        load_s: seconds that such a run takes to its first step.
    """
    nodes.struck_node = draw.randrange(case.num_nodes)
    _wait_for_phase(nodes, case, draw, load_s)
    everything = [pid for launcher in nodes.launchers for pid in (launcher.pid, *descendants(launcher.pid))]
    hit = _hit(nodes, case, draw)
    print(f"  {case}: node {nodes.struck_node}, processes {hit}, at step {nodes.reported()}")
    if case.num_nodes > 1 and case.phase == "loading" and case.asks:  # a scheduler signals all; one alone may wait for the other
        nodes.launchers[1 - nodes.struck_node].terminate()
    begun = time.monotonic()
    codes = [launcher.wait(_LONG_S) for launcher in nodes.launchers]
    seconds_until(lambda: all_ended(everything), _LONG_S)
    return Outcome(codes, time.monotonic() - begun, too_late=not hit)


def problems(nodes: Nodes, case: Case, codes: Sequence[int], expected_weights: str) -> list[str]:
    """Return all differences between the outcome of a case and the table."""
    return [*_wrong_codes(nodes, case, codes), *_wrong_state(nodes, codes, expected_weights)]


def allowed_codes(nodes: Nodes, case: Case, node: int) -> set[int]:
    """Return the exit codes that the table allows for a node. A run that finishes in spite of the signal ends with 0."""
    finished = {int(ExitCode.DONE)} if nodes.weights() else set()
    if case.asks:
        too_early = {int(ExitCode.INTERRUPTED)} if case.number == signal.SIGINT and not nodes.reported() else set()
        return {int(ExitCode.STOPPED)} | too_early | (set() if case.endless else finished)
    if case.member == "launcher":
        return {-signal.SIGKILL} if node == nodes.struck_node else {int(ExitCode.CRASHED)} | finished
    if case.member == "watchdog" or case.num_nodes == 1:
        return finished
    return {int(ExitCode.CRASHED)} | finished  # with several nodes, the scheduler does the restart


def _wrong_codes(nodes: Nodes, case: Case, codes: Sequence[int]) -> Iterator[str]:
    for node, code in enumerate(codes):
        allowed = allowed_codes(nodes, case, node)
        if code not in allowed:
            yield f"node {node} ended with {code}, not {sorted(allowed)}: {nodes.log(node)[-3000:]}"
        if case.asks and "Traceback" in nodes.log(node):
            yield f"node {node} has shown a traceback: {nodes.log(node)[-3000:]}"
        if case.asks and "starting again" in nodes.log(node):
            yield f"node {node} was started again: {nodes.log(node)[-3000:]}"


def _wrong_state(nodes: Nodes, codes: Sequence[int], expected_weights: str) -> Iterator[str]:
    """Yield problems of the files. After a stop the last step must be saved. After any other end no saved step may be lost."""
    reported, run = nodes.reported(), nodes.config.run
    if not reported:
        return
    newest = _newest_whole(run)
    submitted = max((event["step"] for event in metrics(run, "save")), default=0)
    if ExitCode.STOPPED in codes and newest != reported:
        yield f"stopped after step {reported}, and the newest checkpoint is of step {newest}"
    if newest < submitted - nodes.config.checkpoint.every_steps:
        yield f"step {submitted} was being saved, and the newest checkpoint is of step {newest}"
    status = json.loads((run / "record.json").read_text())["status"]
    if ExitCode.STOPPED in codes and status != "stopped":
        yield f"the record says {status!r} of a run that was stopped"
    if ExitCode.DONE in codes and (nodes.weights() != expected_weights or status != "finished"):
        yield f"finished with {nodes.weights()!r}, not {expected_weights!r}, and the record says {status!r}"


def _newest_whole(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 if there is none. Raises CheckpointError if a checkpoint is damaged."""
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        store.verify(step)
    return max(store.steps(), default=0)


def _wait_for_phase(nodes: Nodes, case: Case, draw: random.Random, load_s: float) -> None:
    if case.phase == "loading":
        time.sleep(draw.uniform(0, load_s))
        return
    last = nodes.config.limits.steps
    wanted = last if case.phase == "ending" and last is not None else draw.randrange(1, 15)
    seconds_until(lambda: nodes.reported() >= wanted or nodes.over(), _LONG_S)
    time.sleep(draw.uniform(0, _SPAN_S[case.phase]))


def _hit(nodes: Nodes, case: Case, draw: random.Random) -> list[int]:
    """Send the signal, and return the processes that got it. Empty if all of them had ended."""
    found: list[int] = []
    seconds_until(lambda: found.extend(nodes.members(nodes.struck_node, case.member, draw)) or found or nodes.over(), _LONG_S)
    for pid in found:
        with suppress(ProcessLookupError):
            (os.killpg if case.member == "process group" else os.kill)(pid, case.number)
    return found


def _variables(num_nodes: int) -> list[dict[str, str]]:
    """Return the environment variables of each node."""
    if num_nodes == 1:
        return [{"CPU_RANKS": "2"}]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"CPU_RANKS": "1", "PET_NNODES": str(num_nodes), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    return [shared | {"PET_NODE_RANK": str(node), "GLOO_SOCKET_IFNAME": "lo"} for node in range(num_nodes)]


def _command(config: TrainConfig) -> list[str]:
    return ["env", "--default-signal=INT", str(ROOT / "entrypoints/train"), *arguments(config)]


def _started(command: Sequence[str], log_file: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "TRAIN_RESTART_DELAY_S": "0", "PET_SHUTDOWN_TIMEOUT": "30"}
    with log_file.open("a") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | own | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the process group contains only the launcher
        )


def _log_file(config: TrainConfig, node: int) -> Path:
    return config.run.with_name(f"{config.run.name}-{node}.log")
