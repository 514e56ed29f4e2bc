"""A silent command says how long it has run, and its exit code and output are its own."""

import subprocess
from pathlib import Path

TICKS = Path(__file__).parents[3] / "env/with-ticks"


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), TICKS, "work: waiting", "bash", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_silent_command_tells_its_time() -> None:
    done = run("sleep 1; echo result", TICK_S="0.2")
    assert (done.returncode, done.stdout) == (0, "result\n")
    lines = done.stderr.splitlines()
    assert lines
    assert all(line.startswith("work: waiting, ") and line.endswith(" s so far") for line in lines)


def test_the_exit_code_is_that_of_the_command_and_nothing_is_left_running() -> None:
    done = run("exit 7", TICK_S="100.125")
    assert (done.returncode, done.stderr) == (7, "")
    assert subprocess.run(["pgrep", "-f", "sleep 100.125"], capture_output=True, check=False).returncode == 1
