"""Row 59: a signal at a random moment to a random process of a run, on one node and on two. Checks exit code and saved state.

The table for SIGTERM and SIGINT (`tests.support.signalled.allowed_codes`):

| to | exit code of the launcher of each node |
|---|---|
| launcher, its process group, torchrun, one rank, every process of a node | 75, the last step is saved; 0 if the run was finished |
| the watchdog | 0: the run continues without it |

and for SIGKILL:

| to | one node | two nodes |
|---|---|---|
| one rank, torchrun | 0: started again from the newest checkpoint, ends with the same weights | 1: the scheduler restarts it |
| the watchdog | 0: the run continues without it | 0 |
| the launcher | killed; no process is left | 1 on the other node |

A SIGINT before the first step may also end in 130.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from common.errors import ExitCode
from tests.support.claims import counted, measured, tried
from tests.support.faults import count, is_full, seeds
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from tests.support.signalled import ENDLESS, Case, Outcome, cases, problems, running, struck
from tests.support.two_ranks import seconds_until
from trainer.config import TrainConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc of Linux")

STEPS = 30
PACE = "import time\ndef on_step_end(run, metrics):\n    time.sleep(0.02)\n"


SAMPLE = [Case(2, "node", signal.SIGTERM, "training")]
"""Cases of a continuous integration run."""


@dataclass(frozen=True)
class Bench:
    """Data, configurations and reference values that all trials share."""

    folder: Path

    def config(self, name: str, *, endless: bool = False, code: str = "") -> TrainConfig:
        extension = self.folder / f"{name}.py"
        extension.write_text(PACE + code)
        return tiny_config(
            self.folder / "data",
            self.folder / name,
            extension=extension,
            limits={"steps": ENDLESS if endless else STEPS},
            schedule={"decay_steps": STEPS},
            eval={"every_steps": 10, "sample_tokens": 0},
        )

    @cached_property
    def load_s(self) -> float:
        """Seconds from the start of a run to its first step."""
        with running(self.config("loading", endless=True), 1) as nodes:
            return seconds_until(nodes.reported, 120)

    @cached_property
    def weights(self) -> str:
        """The last line of a run without a signal."""
        with running(self.config("uninterrupted"), 1) as nodes:
            assert nodes.launchers[0].wait(120) == 0, nodes.log(0)
            return nodes.weights()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("signals"))
    write_prepared(bench.folder / "data")
    return bench


def case_of(seed: int) -> Case:
    """Return the case for a seed. A full campaign goes through the table repeatedly, each time in a random order."""
    if not is_full():
        return SAMPLE[seed % len(SAMPLE)]
    table = cases()
    random.Random(seed // len(table)).shuffle(table)
    return table[seed % len(table)]


def outcome(bench: Bench, name: str, seed: int, case: Case, code: str = "") -> tuple[list[str], Outcome]:
    """Send the signal of a case to a new run, and return the problems and the outcome."""
    load_s = bench.load_s if case.phase == "loading" else 0.0
    weights = "" if case.endless else bench.weights
    with running(bench.config(name, endless=case.endless, code=code), case.num_nodes) as nodes:
        ended = struck(nodes, case, random.Random(seed), load_s)
        return problems(nodes, case, ended.codes, weights), ended


@pytest.mark.claim("59", "signal to a launcher, torchrun, a rank, the watchdog, a process group or a whole node", unit="signals")
def test_a_signal_at_any_moment_to_any_process_ends_in_the_exit_code_of_the_table_and_loses_nothing(bench: Bench) -> None:
    found = []
    for seed in seeds(len(SAMPLE), 300):
        case = case_of(seed)
        wrong, ended = outcome(bench, f"struck-{seed}", seed, case)
        found += [f"seed {seed}, {case}: {each}" for each in wrong]
        if ended.too_late:
            tried(-1)
            continue
        counted(f"on {case.num_nodes} node{'s' * (case.num_nodes > 1)}", 1)
        if case.asks:
            measured("s from a request to the end of all processes", ended.seconds)
        elif case.number == signal.SIGKILL and case.member == "launcher" and case.num_nodes == 1:
            measured("s from the death of a launcher to the end of all processes", ended.seconds)
    assert not found, "\n".join(found)


SLOW_END = """
import time
from pathlib import Path
def on_train_end(run):
    Path(f"{run.config.run}.ending").touch()
    time.sleep(6)
"""


def test_further_signals_do_not_end_the_wait_for_the_ranks(bench: Bench) -> None:
    """Some schedulers signal every process of a node repeatedly."""
    config = bench.config("again", endless=True, code=SLOW_END)
    with running(config, 1) as nodes:
        seconds_until(lambda: nodes.reported() >= 2 or nodes.over(), 120)
        (torchrun,) = nodes.members(0, "torchrun", random.Random(0))
        nodes.launchers[0].terminate()
        seconds_until(lambda: Path(f"{config.run}.ending").exists() or nodes.over(), 60)
        for _ in range(2):
            os.kill(torchrun, signal.SIGTERM)
            time.sleep(0.5)
        code = nodes.launchers[0].wait(60)
        assert problems(nodes, Case(1, "launcher", signal.SIGTERM, "training"), [code], "") == []


def test_an_error_of_rank_0_is_the_exit_code_of_every_node(bench: Bench) -> None:
    config = bench.config("refused")
    config.run.mkdir()
    (config.run / "checkpoints").write_text("in the way")  # only rank 0 looks for checkpoints; it finds no folder
    with running(config, 2) as nodes:
        assert [launcher.wait(120) for launcher in nodes.launchers] == [ExitCode.CHECKPOINT] * 2, nodes.log(1)
        assert nodes.log(0).count("error: ") == 1
        assert "error: a rank on another node ended the run; see the log of that node for the reason\n" in nodes.log(1)


KILLED_BY_A_STOP = """
import signal
def on_train_start(run):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""
TELLS_NO_CODE = """
import os
def on_train_end(run):
    os._exit(1)
"""
BROKEN = {"ranks that a stop kills": (1, KILLED_BY_A_STOP), "ranks that do not tell their exit code": (2, TELLS_NO_CODE)}
"""Number of nodes, and the code that is added to the extension."""


@pytest.mark.parametrize("variant", [pytest.param(name, marks=pytest.mark.broken("59", name)) for name in BROKEN][: count(1, 2)])
def test_a_wrong_exit_code_is_noticed(bench: Bench, variant: str) -> None:
    num_nodes, code = BROKEN[variant]
    wrong, _ = outcome(bench, f"broken-{num_nodes}", 0, Case(num_nodes, "launcher", signal.SIGTERM, "training"), code)
    assert any("ended with 1, not [75]" in each for each in wrong), wrong
