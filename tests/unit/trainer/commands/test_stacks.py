"""Asking the ranks of a running training what they do: real processes, and heartbeats that name others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError
from tests.support.runs import ROOT
from tests.support.two_ranks import seconds_until
from trainer.commands import stacks
from trainer.commands.stacks import show_stacks
from trainer.watchdog import processes, watch
from trainer.watchdog.heartbeat import Heartbeat
from trainer.watchdog.processes import ProcessId

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")

RANK = """
    import sys
    from pathlib import Path
    from trainer.watchdog.heartbeat import Timeouts
    from trainer.watchdog.watch import watched

    def wait_for_the_test():
        sys.stdin.read()

    run, rank, enabled = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "on"
    with watched(run, Timeouts(600, 600), rank=rank, local_rank=1, enabled=enabled):  # local rank 0 would start a watchdog
        print("up", flush=True)
        wait_for_the_test()
"""
BYSTANDER = """
    import sys
    files = [open(path) for path in sys.argv[1:]]
    print("up", flush=True)
    sys.stdin.read()
"""
OWN_PIDS = ["unshare", "--pid", "--fork", "--mount-proc", *(["--map-root-user"] if os.getuid() else [])]


@cache
def may_have_own_pids() -> bool:
    try:
        return subprocess.run([*OWN_PIDS, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@contextmanager
def process(code: str, *arguments: object, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that runs some code until its input ends."""
    command = [*before, sys.executable, "-S", "-c", textwrap.dedent(code), *map(str, arguments)]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        with started.stdin, started.stdout:
            assert started.stdout.readline() == "up\n"
            yield started
    finally:
        started.send_signal(signal.SIGCONT)
        try:
            started.wait(60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def identity(started: subprocess.Popen[str]) -> ProcessId:
    found = processes.process_facts(started.pid)
    assert found is not None
    return ProcessId(started.pid, found[1])


def beat_of(path: Path) -> Heartbeat:
    beat = Heartbeat.from_bytes(path.read_bytes())
    assert beat is not None
    return beat


def test_every_rank_shows_its_stacks_and_goes_on(tmp_path: Path) -> None:
    with process(RANK, tmp_path, 0, "on") as first, process(RANK, tmp_path, 1, "on") as second:
        (tmp_path / "heartbeat/rank-00").write_text("no name of a rank, which would hide rank 0")
        command = [sys.executable, "-m", "trainer", "stacks", str(tmp_path)]
        shown = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False) for _ in range(2)]
        assert (first.poll(), second.poll()) == (None, None)
    for each in shown:
        assert each.returncode == 0, each.stderr
        parts = each.stdout.split("# 20")[1:]
        assert len(parts) == 2, "the stacks of this moment alone, and of each rank"
        for rank, started, part in zip((0, 1), (first, second), parts, strict=True):
            assert f" rank {rank}, process {started.pid}, step 0, phase loading\n" in part
            assert " in wait_for_the_test\n" in part
            assert f"(appended to {tmp_path}/stacks/rank-{rank}.txt)\n" in part
    assert (first.returncode, second.returncode) == (0, 0)


@pytest.mark.parametrize("has_the_file_open", [False, True])
def test_a_heartbeat_that_names_a_process_of_others_has_nothing_sent_to_it(tmp_path: Path, has_the_file_open: bool) -> None:
    """SIGUSR1 would end it."""
    path = tmp_path / "heartbeat/rank-0"
    with process(RANK, tmp_path, 0, "on"):
        beat = beat_of(path)
    with process(BYSTANDER, *([path] if has_the_file_open else [])) as bystander:
        other = identity(bystander)
        path.write_bytes(replace(beat, pid=other.pid, started=other.started).to_bytes())
        with pytest.raises(ConfigError, match=f"rank 0: process {other.pid}, which its heartbeat names, is not this rank"):
            show_stacks(tmp_path)
        path.write_bytes(replace(beat, pid=other.pid, started=other.started - 1).to_bytes())
        with pytest.raises(ConfigError, match=f"rank 0: its process {other.pid} has ended"):
            show_stacks(tmp_path)
    assert bystander.returncode == 0


def test_a_rank_that_would_be_ended_by_the_signal_does_not_get_it(tmp_path: Path) -> None:
    with process(RANK, tmp_path, 0, "off") as unwatched, process(RANK, tmp_path, 1, "on"):
        shown = show_stacks(tmp_path)
        remedy = "start the training with --watchdog.enabled on"
        assert shown.endswith(f"rank 0: the watchdog is off, so the rank does not answer; {remedy}")
        assert " rank 1, process " in shown
    assert unwatched.returncode == 0


def test_a_rank_that_executes_no_python_shows_its_stacks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = textwrap.dedent(RANK).replace("sys.stdin.read()", "sum(range(10**15))  # C code that looks for no signals")
    monkeypatch.setattr(watch, "_STACKS_S", 1.0)
    with process(stuck, tmp_path, 0, "on") as rank:
        # the first request may come before the rank is in C code
        seconds_until(lambda: " in wait_for_the_test\n" in show_stacks(tmp_path), 60)
        assert rank.poll() is None
        rank.kill()


def test_a_rank_that_is_asked_again_while_it_answers_goes_on(tmp_path: Path) -> None:
    deep = """import select
    def below(depth):
        while depth == 0 and not select.select([sys.stdin], [], [], 0)[0]:
            pass
        if depth:
            below(depth - 1)
    below(500)"""
    with process(textwrap.dedent(RANK).replace("sys.stdin.read()", deep), tmp_path, 0, "on") as rank:
        for _ in range(1000):
            rank.send_signal(signal.SIGUSR2)
            time.sleep(1e-3)
    assert rank.returncode == 0


@pytest.mark.parametrize("request_", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_rank_that_is_ending_survives_a_request_that_comes_late(tmp_path: Path, request_: signal.Signals) -> None:
    ends = textwrap.dedent(RANK).replace('    print("up", flush=True)\n    wait_for_the_test()', "    pass")
    with process(f'{ends}\nprint("up", flush=True)\nwait_for_the_test()', tmp_path, 0, "on") as rank:
        rank.send_signal(request_)
    assert rank.returncode == 0


def test_a_rank_that_ends_meanwhile_gets_no_signal_nor_does_another_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check and the signal the pid goes to another process."""
    with process(RANK, tmp_path, 0, "on") as rank, process(BYSTANDER) as bystander:
        original = stacks.collect_stacks
        other = replace(beat_of(tmp_path / "heartbeat/rank-0"), pid=bystander.pid)

        def collect(run: Path, beats: dict[int, Heartbeat], ask: object) -> dict[int, int]:
            beats[0] = other
            return original(run, beats, ask)  # type: ignore[arg-type]

        monkeypatch.setattr(stacks, "collect_stacks", collect)
        monkeypatch.setattr(watch, "_STACKS_S", 0.0)
        assert show_stacks(tmp_path) == f"rank 0: its process {bystander.pid} has ended"
        assert rank.poll() is None
    assert bystander.returncode == 0


def test_where_the_kernel_cannot_name_a_process_for_ever_nothing_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    with process(RANK, tmp_path, 0, "on"):
        monkeypatch.setattr(os, "pidfd_open", refuse)
        monkeypatch.setattr(watch, "_STACKS_S", 0.0)
        assert show_stacks(tmp_path).startswith("rank 0: no signal could be sent (Function not implemented); ")


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with process(RANK, tmp_path, 0, "on") as rank:
        rank.send_signal(signal.SIGSTOP)
        seconds_until(lambda: processes.process_state(identity(rank)) == "T", 20)
        with pytest.raises(ConfigError, match="rank 0: a signal has stopped it; it answers after SIGCONT"):
            show_stacks(tmp_path)


@pytest.mark.skipif(not may_have_own_pids(), reason="needs its own pid namespace, which this machine forbids")
def test_a_rank_in_another_container_is_not_mistaken_for_a_process_of_this_one(tmp_path: Path) -> None:
    with process(RANK, tmp_path, 0, "on", before=OWN_PIDS):
        pid = beat_of(tmp_path / "heartbeat/rank-0").pid
        assert Path(f"/proc/{pid}").exists(), "a process of this machine has the same number"
        reason = r"\(rank 0: it belongs to another container\); run the command during the training, in its container"
        with pytest.raises(ConfigError, match=reason):
            show_stacks(tmp_path)


def test_a_folder_that_does_not_exist_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no record\.json, so this is not a run"):
        show_stacks(tmp_path / "nowhere")


def test_without_a_running_training_the_command_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rank that can show its stacks is running here \\(no rank has written a heartbeat\\)"):
        show_stacks(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(process(RANK, tmp_path, 0, "on"))
    with pytest.raises(ConfigError, match="\\(rank 0: it is done\\)"):
        show_stacks(tmp_path)
