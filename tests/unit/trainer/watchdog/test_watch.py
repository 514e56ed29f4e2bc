"""Heartbeats, the verdict on a group that stands still, and the process that ends it."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.runs import ROOT
from trainer.watchdog import processes, watch
from trainer.watchdog.heartbeat import PHASES, Heartbeat, HeartbeatWriter, Phase, Timeouts, remove_heartbeats
from trainer.watchdog.processes import ProcessId
from trainer.watchdog.watch import StallDetector, Still, watched

TIMEOUTS = Timeouts(stall_s=None, slow_s=600)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")

beats = st.builds(
    Heartbeat,
    number=st.integers(0, 10**12 - 1),
    pid=st.integers(1, 10**7),
    started=st.integers(0, 10**15),
    step=st.integers(0, 10**12 - 1),
    phase=st.sampled_from(PHASES),
    limit_s=st.integers(0, 10**7).map(lambda tenths: tenths / 10) | st.just(math.inf),
    lap=st.integers(0, 10**6 - 1),
)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@given(beats)
def test_a_beat_is_read_as_it_was_written(beat: Heartbeat) -> None:
    assert Heartbeat.from_bytes(beat.to_bytes()) == beat


@given(beats, beats)
def test_every_beat_is_a_line_of_one_length_so_that_it_replaces_the_one_before(one: Heartbeat, other: Heartbeat) -> None:
    assert len(one.to_bytes()) == len(other.to_bytes())
    assert one.to_bytes().index(b"\n") == len(one.to_bytes()) - 1


@given(beats, st.integers(0, 140), st.binary(max_size=140))
def test_a_line_that_is_half_written_is_a_beat_or_none_but_no_error(beat: Heartbeat, cut: int, rest: bytes) -> None:
    Heartbeat.from_bytes(beat.to_bytes()[:cut] + rest)
    assert Heartbeat.from_bytes(beat.to_bytes()[:100]) is None
    assert Heartbeat.from_bytes(b"") is None


def test_silence_in_a_step_is_allowed_for_30_s_or_three_times_the_slowest_recent_step() -> None:
    assert TIMEOUTS.limit_s("data", [1, 2, 3]) == 30
    assert TIMEOUTS.limit_s("reduce", [1, 20, 3]) == 60
    assert Timeouts(5, 600).limit_s("forward", [1, 20, 3]) == 5


def test_loading_evaluating_saving_and_the_first_three_steps_may_take_longer() -> None:
    for phase in ("loading", "evaluate", "save"):
        assert TIMEOUTS.limit_s(phase, [1] * 50) == 600
    assert TIMEOUTS.limit_s("forward", [1, 1]) == 600
    assert TIMEOUTS.limit_s("save", [300] * 3) == 900  # never less than a step
    assert TIMEOUTS.limit_s("done", []) == math.inf


def read(path: Path) -> Heartbeat:
    beat = Heartbeat.from_bytes(path.read_bytes())
    assert beat is not None
    return beat


def test_a_heartbeat_shows_phase_and_step_and_that_time_has_passed(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat/rank-3"
    heartbeat = HeartbeatWriter(path, TIMEOUTS)
    first = read(path)
    assert (first.pid, first.step, first.phase) == (os.getpid(), 0, "loading")
    heartbeat.at("data", 7)
    heartbeat.at("forward")
    assert (read(path).step, read(path).phase) == (7, "forward")
    with heartbeat.phase("save"):
        assert (read(path).step, read(path).phase) == (7, "save")
        os.utime(path, (0, 0))
        heartbeat.beat()
        assert read(path).phase == "save"
        assert path.stat().st_mtime > 0, "the health check looks at the time of the file"
    assert (read(path).step, read(path).phase) == (7, "forward")
    assert read(path).number == 6
    assert path.stat().st_size == len(first.to_bytes())
    heartbeat.close()
    assert (read(path).phase, read(path).limit_s) == ("done", math.inf)


def test_the_slowest_of_the_last_50_steps_counts_and_what_lies_between_steps_does_not(tmp_path: Path) -> None:
    path, clock = tmp_path / "rank-0", FakeClock()
    heartbeat = HeartbeatWriter(path, TIMEOUTS, clock)
    clock.now_s += 500  # loading is no step
    limits = []
    for step in range(1, 61):
        heartbeat.at("data", step)
        limits.append(read(path).limit_s)
        clock.now_s += 20 if step == 5 else 1
        with heartbeat.phase("evaluate"):
            clock.now_s += 400
            with heartbeat.phase("save"):
                clock.now_s += 400
    heartbeat.close()
    assert limits[:5] == [600, 600, 600, 30, 30]
    assert set(limits[5:55]) == {60}
    assert set(limits[55:]) == {30}


def test_a_run_that_goes_back_to_an_earlier_step_is_further_than_before(tmp_path: Path) -> None:
    heartbeat = HeartbeatWriter(tmp_path / "rank-0", TIMEOUTS)
    places = []
    for step in (1, 2, 3, 2, 3, 4, 1):
        heartbeat.at("data", step)
        places.append(read(tmp_path / "rank-0").place)
        heartbeat.at("reduce")
        places.append(read(tmp_path / "rank-0").place)
    heartbeat.close()
    assert places == sorted(set(places))
    assert read(tmp_path / "rank-0").lap == 2


def test_after_a_change_the_next_steps_may_be_slow_again(tmp_path: Path) -> None:
    heartbeat = HeartbeatWriter(tmp_path / "rank-0", TIMEOUTS)
    for step in range(1, 6):
        heartbeat.at("data", step)
    assert read(tmp_path / "rank-0").limit_s == 30
    heartbeat.expect_slow_steps()
    heartbeat.at("data", 6)
    assert read(tmp_path / "rank-0").limit_s == 600
    heartbeat.close()


def test_a_step_with_a_new_shape_and_the_next_two_may_be_slow(tmp_path: Path) -> None:
    heartbeat = HeartbeatWriter(tmp_path / "rank-0", TIMEOUTS)
    limits = []
    for step in range(1, 13):
        heartbeat.at("data", step)
        heartbeat.at_forward({("tokens", (4 if step < 6 else 2, 32)), ("bounds", (17 if step % 2 else 33,))})
        limits.append(read(tmp_path / "rank-0").limit_s)
        heartbeat.at("reduce")
        assert read(tmp_path / "rank-0").limit_s == limits[-1], "the last backward pass is compiled, too"
    heartbeat.close()
    assert limits == [600, 600, 600, 600, 30, 600, 600, 600, 30, 30, 30, 30]


def beat(step: int = 9, phase: Phase = "forward", number: int = 0, limit_s: float = 30) -> Heartbeat:
    return Heartbeat(number, 1, 1, step, phase, limit_s)


def look(
    detector: StallDetector, seconds: int, seen: Callable[[int], dict[int, Heartbeat]], stopped: tuple[int, ...] = ()
) -> list[int]:
    """Observes every second; the ranks blamed when first some are, with the second in front."""
    for second in range(seconds):
        if blamed := detector.observe(1000.0 + second, seen(second), stopped):
            return [second, *(still.rank for still in blamed)]
    return []


def test_a_rank_is_blamed_once_it_has_been_silent_for_longer_than_it_may() -> None:
    assert look(StallDetector(), 100, lambda second: {0: beat()}) == [31, 0]
    assert look(StallDetector(), 100, lambda second: {0: beat(number=min(second, 20))}) == [51, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PHASES[:-1]), st.floats(0.1, 4)), max_size=60))
def test_ranks_that_send_signs_of_life_are_never_blamed(signs: list[tuple[int, Phase, float]]) -> None:
    detector, now_s = StallDetector(), 0.0
    seen = {rank: beat(limit_s=5) for rank in range(4)}
    for number, (rank, phase, pause_s) in enumerate(signs):
        now_s += pause_s
        seen = {other: beat(number // 4, phase, number, 5) if number % 2 or other == rank else old for other, old in seen.items()}
        assert detector.observe(now_s, seen) == ()


def test_the_rank_that_is_behind_is_blamed_and_not_those_that_wait_for_it() -> None:
    waiting, behind = beat(9, "reduce"), beat(9, "data")
    assert look(StallDetector(), 100, lambda _: {0: waiting, 1: behind, 2: waiting}) == [31, 1]
    assert look(StallDetector(), 100, lambda _: {0: beat(10, "data"), 1: beat(9, "report")}) == [31, 1]
    gone_back = replace(beat(4, "reduce"), lap=1)
    assert look(StallDetector(), 100, lambda _: {0: gone_back, 1: beat(9, "loading", limit_s=60)}) == [61, 1]


def test_ranks_may_wait_for_as_long_as_the_one_behind_may_be_silent() -> None:
    """Rank 0 writes a sample while the others have gone on to the next step."""
    seen = {0: beat(9, "evaluate", limit_s=600), 1: beat(10, "reduce", limit_s=30)}
    assert look(StallDetector(), 1000, lambda _: seen) == [601, 0]
    assert look(StallDetector(), 1000, lambda second: {0: beat(9, "evaluate", second), 1: beat(10, "reduce")}) == []


def test_where_all_are_at_one_place_the_stopped_one_is_blamed_else_all_with_the_longest_silent_first() -> None:
    same = {rank: beat(9, "reduce") for rank in range(3)}
    assert look(StallDetector(), 100, lambda _: same, stopped=(2,)) == [31, 2]
    assert look(StallDetector(), 100, lambda second: {0: beat(number=min(second, 2)), 1: beat()}) == [33, 1, 0]


def test_a_rank_that_has_ended_is_waited_for_by_nobody() -> None:
    assert look(StallDetector(), 100, lambda second: {} if second > 20 else {0: beat()}) == []


Beats = dict[int, Heartbeat]


def look_at_nodes(seconds: int, here: Callable[[int], Beats], elsewhere: Callable[[int], Beats]) -> list[int]:
    """Observes every second; the ranks blamed when first some are, with the second in front."""
    detector = StallDetector()
    for second in range(seconds):
        if blamed := detector.observe(1000.0 + second, here(second), (), elsewhere(second)):
            return [second, *(still.rank for still in blamed)]
    return []


def test_a_rank_that_waits_for_another_node_is_not_blamed_while_that_node_may_be_slow_or_end_its_rank() -> None:
    waiting = {0: beat(9, "reduce")}
    slow = {1: beat(8, "evaluate", limit_s=600)}
    moves_once = {1: beat(8, "evaluate", number=-1, limit_s=600)}
    assert look_at_nodes(600, lambda _: waiting, lambda second: slow if second else moves_once) == []
    stuck, before = {1: beat(9, "data")}, {1: beat(8, "reduce")}
    assert look_at_nodes(200, lambda _: waiting, lambda second: stuck if second else before) == [92, 1], (
        "30 s and 60 s after second 1"
    )


def test_a_rank_that_is_behind_those_of_other_nodes_or_beside_them_is_blamed_at_its_limit() -> None:
    for place in (beat(10, "data"), beat(9, "report"), beat(9, "reduce")):
        others = [{1: replace(place, number=-1)}, {1: place}]
        assert look_at_nodes(200, lambda _: {0: beat(9, "reduce")}, lambda second, others=others: others[second > 0]) == [31, 0]


def test_a_heartbeat_of_another_node_that_never_changes_or_is_gone_delays_nothing() -> None:
    waiting, left = {0: beat(9, "reduce")}, {1: beat(3, "data")}
    assert look_at_nodes(200, lambda _: waiting, lambda _: left) == [31, 0]
    seen = [{1: beat(2, "data")}, left, {}]
    assert look_at_nodes(200, lambda _: waiting, lambda second: seen[min(second // 20, 2)]) == [40, 0]


def test_a_watchdog_that_did_not_run_for_a_while_begins_its_count_again() -> None:
    detector = StallDetector()
    assert look(detector, 30, lambda _: {0: beat()}) == []
    assert detector.observe(9000.0, {0: beat()}) == ()
    assert [detector.observe(9000.0 + second, {0: beat()}) != () for second in (4, 8, 30)] == [False, False, False]
    assert look(StallDetector(), 32, lambda _: {0: beat()}) == [31, 0]


def test_what_an_earlier_start_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    remove_heartbeats(tmp_path)
    (tmp_path / "heartbeat/rank-0").write_text("old")
    (tmp_path / "metrics.jsonl").write_text("kept")
    remove_heartbeats(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["heartbeat", "metrics.jsonl"]


@LINUX
def test_the_watchdog_imports_nothing_but_the_standard_library() -> None:
    code = "import sys, trainer.watchdog.watch; print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert set(found.stdout.split()) - {"__main__", "__mp_main__"} == {"trainer"}


def wait_until(condition: Callable[[], object], timeout_s: float = 50) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def runs(pid: int) -> bool:
    return processes.is_running(pid)


@contextmanager
def python(code: str, *arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs some code, killed at the end."""
    command = [sys.executable, "-S", "-c", textwrap.dedent(code), *map(str, arguments)]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (
            process.stdin,
            process.stdout,
            process.stderr,
        ):  # not read to its end: whatever was left running would hold it open
            if pipe is not None:
                pipe.close()


CHILD = (
    "import sys, time; "
    "from trainer.watchdog.processes import end_with_parent; end_with_parent(); print('up', flush=True); time.sleep(60)"
)


@LINUX
def test_a_process_ends_with_the_one_that_started_it() -> None:
    parent = f"""
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-S", "-c", {CHILD!r}], stdout=subprocess.PIPE)
        child.stdout.readline()
        print(child.pid, flush=True)
        child.wait()
    """
    with python(parent) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert runs(child)
        process.kill()
        ended = wait_until(lambda: not runs(child))
        if not ended:
            os.kill(child, signal.SIGKILL)
        assert ended


@LINUX
def test_a_process_whose_launcher_has_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and the kernel keeps its number until that is noted
    for _ in range(2):
        with python(CHILD, TRAINER_LAUNCHER_PID=str(gone.pid)) as process:
            assert process.wait(50) == -signal.SIGKILL
        gone.wait()
    with python(CHILD, TRAINER_LAUNCHER_PID=str(os.getpid())) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"


RANK = """
    import ctypes, os, sys, threading, time
    from pathlib import Path
    from trainer.watchdog.heartbeat import Timeouts
    from trainer.watchdog.processes import ProcessId
    from trainer.watchdog.watch import watched

    stuck_at = int(os.environ.get("STUCK_AT", "20"))
    run, rank, does = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print(ProcessId.own(), flush=True)
    processes = [ProcessId.parse(word) for word in sys.stdin.readline().split()]
    num_ranks, local_rank = len(processes), rank
    if sys.argv[4:] == ["nodes"]:  # each rank is on a different node
        processes, local_rank = [processes[rank]], 0

    def hold_the_lock():
        ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

    def wait_for_ever():
        threading.Event().wait()

    def another_thread():
        threading.Event().wait()

    threading.Thread(target=another_thread, daemon=True).start()

    settings = {"local_rank": local_rank, "processes": processes, "num_ranks": num_ranks}
    with watched(run, Timeouts(1.0, 60.0), rank=rank, **settings) as heartbeat:
        for step in range(1, 10_000):
            heartbeat.at("data", step)
            if step == stuck_at and does == "data":
                wait_for_ever()
            heartbeat.at("forward")
            if step == stuck_at and does == "lock":
                hold_the_lock()
            if step == 10 and does in ("end", "linger"):
                break
            heartbeat.at("reduce")
            if step == stuck_at and does == "wait":
                wait_for_ever()
            time.sleep(0.01)
    if does == "linger":
        time.sleep(60)
"""


@contextmanager
def ranks(run: Path, *does: str, where: str = "node", **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Ranks of one node that do these things, or with `where="nodes"` of one node each; they know each other's processes."""
    with ExitStack() as stack:
        started = [stack.enter_context(python(RANK, run, rank, what, where, **environment)) for rank, what in enumerate(does)]
        known = [process.stdout.readline().strip() for process in started if process.stdout is not None]
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{' '.join(known)}\n")
            process.stdin.flush()
        yield started


@LINUX
def test_a_rank_that_holds_the_lock_is_named_shows_its_stacks_and_takes_the_group_with_it(tmp_path: Path) -> None:
    exit_file = tmp_path / "exit"
    variables = {"TRAINER_EXIT_FILE": str(exit_file)}
    with ranks(tmp_path, "wait", "lock", **variables) as (waits, hangs):
        assert hangs.wait(50) == -signal.SIGKILL
        assert waits.wait(50) == -signal.SIGKILL
        assert waits.stderr is not None
        said = waits.stderr.read()
    assert f"rank 1 (process {hangs.pid}, asleep) has made no progress for " in said
    assert "in phase forward of step 20 (limit 1 s)" in said
    assert "rank 0" not in said
    assert exit_file.read_text().startswith(f"1 rank 1 (process {hangs.pid}, ")
    for rank, process, phase, function in ((0, waits, "reduce", "wait_for_ever"), (1, hangs, "forward", "hold_the_lock")):
        stacks = (tmp_path / f"stacks/rank-{rank}.txt").read_text()
        assert f"rank {rank}, process {process.pid}, step 20, phase {phase}\n" in stacks
        assert f" in {function}\n" in stacks
        assert " in another_thread\n" in stacks


@LINUX
def test_each_node_ends_its_own_rank_and_names_the_one_that_is_behind(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait", "data", where="nodes", STUCK_AT="200") as (waits, hangs):  # seconds after the first look
        assert hangs.wait(50) == -signal.SIGKILL
        assert waits.wait(50) == -signal.SIGKILL
        assert hangs.stderr is not None
        assert waits.stderr is not None
        said = {0: waits.stderr.read(), 1: hangs.stderr.read()}
    assert f"rank 1 (process {hangs.pid}, asleep) has made no progress for " in said[1]
    assert "rank 0" not in said[1]
    assert "in phase reduce of step 200 (limit 1 s); rank 1 on another node has ended, " in said[0]
    assert list((tmp_path / "heartbeat").iterdir()) == []


@pytest.mark.parametrize(
    ("states", "phase", "elsewhere", "ended", "end"),
    [
        ({0: "S"}, "reduce", {}, set(), "(limit 30 s)"),
        ({0: "S"}, "reduce", {1: beat(9, "reduce")}, set(), "rank 1 on another node waits there too, so perhaps the network"),
        ({0: "S"}, "reduce", {2: beat(9, "report")}, set(), "rank 2 on another node is further, so rank 0 is stuck or the network"),
        ({0: "S"}, "data", {2: beat(9, "report")}, set(), "(limit 30 s)"),
        ({0: "S"}, "reduce", {}, {3, 1}, "ranks 1, 3 on other nodes have ended, perhaps because the network"),
        ({1: "S"}, "reduce", {0: beat(9, "reduce")}, set(), "perhaps its node or the network"),
    ],
)
def test_the_reason_tells_a_stuck_rank_from_a_lost_network_as_far_as_heartbeats_show(
    states: dict[int, str], phase: Phase, elsewhere: Beats, ended: set[int], end: str
) -> None:
    reason = watch._reason([Still(0, beat(9, phase), 33.0)], states, elsewhere, ended)
    assert reason.startswith(
        f"rank 0 ({'process 1, asleep' if 0 in states else 'on another node'}) has made no progress for 33 s in "
    )
    assert end in reason.rpartition("; ")[2]


@LINUX
def test_nodes_that_wait_for_each_other_name_the_network(tmp_path: Path) -> None:
    with ranks(tmp_path, "wait", "wait", where="nodes") as waiting:
        for process in waiting:
            assert process.wait(50) == -signal.SIGKILL
        said = [process.stderr.read() for process in waiting if process.stderr is not None]
    assert any("waits there too, so perhaps the network between the nodes is lost" in each for each in said), said


@LINUX
def test_a_rank_that_is_done_keeps_nobody_and_an_exit_code_that_was_left_is_not_replaced(tmp_path: Path) -> None:
    exit_file = tmp_path / "exit"
    exit_file.write_text("3\n")
    variables = {"TRAINER_EXIT_FILE": str(exit_file)}
    with ranks(tmp_path, "data", "linger", **variables) as (hangs, done):
        assert hangs.wait(50) == -signal.SIGKILL
        assert done.poll() is None
        assert hangs.stderr is not None
        assert "in phase data of step 20" in hangs.stderr.read()
    assert exit_file.read_text() == "3\n"


@LINUX
def test_a_stuck_rank_is_ended_though_its_stacks_cannot_be_written(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks/rank-0.txt"
    with ranks(tmp_path, "data") as (hangs,):
        assert wait_until(lambda: place_of(tmp_path / "heartbeat/rank-0")[0] > 0)
        stacks.unlink()
        stacks.mkdir()
        assert hangs.wait(50) == -signal.SIGKILL


@LINUX
def test_a_watchdog_ends_with_its_rank_and_leaves_ranks_alone_that_work_or_are_done(tmp_path: Path) -> None:
    with ranks(tmp_path, "work", "end") as (works, ends):
        assert ends.wait(50) == 0
        assert wait_until(lambda: place_of(tmp_path / "heartbeat/rank-0")[0] > 200)  # longer than rank 1 might have been silent
        (dog,) = [int(pid) for pid in children_of(works.pid)]
        assert runs(dog)
        works.kill()
        assert wait_until(lambda: not runs(dog))
    assert ends.stderr is not None
    assert not (tmp_path / "stacks/rank-1.txt").exists(), "nothing was asked of it"


def place_of(path: Path) -> tuple[int, str]:
    """Step and phase of a rank that may not have begun."""
    beat = Heartbeat.from_bytes(path.read_bytes()) if path.exists() else None
    return (beat.step, beat.phase) if beat else (0, "")


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@LINUX
def test_a_stopped_rank_is_blamed_though_the_other_is_at_the_same_place(tmp_path: Path) -> None:
    """It is the one that has started the watchdog, which has to outlive it until the other is ended too."""
    with ranks(tmp_path, "wait", "wait") as (stopped, waits):
        assert wait_until(lambda: place_of(tmp_path / "heartbeat/rank-0") == (20, "reduce"))
        os.kill(stopped.pid, signal.SIGSTOP)
        assert stopped.wait(50) == -signal.SIGKILL
        assert waits.wait(50) == -signal.SIGKILL
        assert stopped.stderr is not None
        said = stopped.stderr.read()
    assert f"rank 0 (process {stopped.pid}, stopped by a signal) has made no progress" in said
    assert "rank 1" not in said
    assert "most recent call first" in (tmp_path / "stacks/rank-0.txt").read_text()


@LINUX
@pytest.mark.parametrize("forged", ["other process", "link", "pipe", "nan"])
def test_a_changed_heartbeat_has_no_other_process_killed(tmp_path: Path, forged: str) -> None:
    """The file of rank 1 names a process of the same user that is none of the ranks, and says that it has stood still."""
    path = tmp_path / "heartbeat/rank-1"
    with (
        python("print('up', flush=True); import time; time.sleep(60)") as bystander,
        ranks(tmp_path, "work", "end") as (works, ends),
    ):
        assert bystander.stdout is not None
        assert bystander.stdout.readline() == "up\n"
        assert ends.wait(50) == 0
        (started,) = [found[1]] if (found := processes.process_facts(bystander.pid)) else []
        line = Heartbeat(0, bystander.pid, started, 1, "forward", 0.0).to_bytes()
        path.unlink()
        if forged == "link":
            (tmp_path / "elsewhere").write_bytes(line)
            path.symlink_to(tmp_path / "elsewhere")
        elif forged == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(line.replace(b"         0.0", b"         nan") if forged == "nan" else line)
        step = place_of(tmp_path / "heartbeat/rank-0")[0]
        assert wait_until(lambda: place_of(tmp_path / "heartbeat/rank-0")[0] > step + 300 or works.poll() is not None)
        assert (works.poll(), bystander.poll()) == (None, None)
        (dog,) = children_of(works.pid)
        assert runs(int(dog)), "it still watches"


@LINUX
def test_signals_go_only_to_processes_that_the_watchdog_was_given(tmp_path: Path) -> None:
    """Of a pid that another process has by now, only the number is the same."""
    with python("print('up', flush=True); import time; time.sleep(60)") as bystander:
        assert bystander.stdout is not None
        assert bystander.stdout.readline() == "up\n"
        found = processes.process_facts(bystander.pid)
        assert found is not None
        given = {0: ProcessId(bystander.pid, found[1] - 1)}
        (tmp_path / "heartbeat").mkdir()
        (tmp_path / "heartbeat/rank-0").write_bytes(Heartbeat(0, bystander.pid, found[1], 1, "forward", 0.0).to_bytes())
        assert watch._look(tmp_path, given) == ({}, {})
        processes.signal_if_running(given[0], signal.SIGKILL)
        time.sleep(0.1)
        assert bystander.poll() is None


@pytest.mark.parametrize("place", ["heartbeat", "stacks", "heartbeat/rank-0", "stacks/rank-0.txt"])
@pytest.mark.parametrize("second_name", [False, True], ids=["link", "second name"])
def test_nothing_is_written_through_a_link(tmp_path: Path, place: str, second_name: bool) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    for name in ("rank-0", "rank-0.txt"):
        (victim / name).write_text("precious")
    path = run / place
    path.parent.mkdir(parents=True)
    if "/" not in place:
        path.symlink_to(victim)
    elif second_name:
        path.hardlink_to(victim / path.name)
    else:
        path.symlink_to(victim / path.name)
    with suppress(OSError):
        remove_heartbeats(run)
    with suppress(OSError), watched(run, TIMEOUTS, rank=0):
        pass
    assert {item.name: item.read_text() for item in victim.iterdir() if item.is_file()} == {
        "rank-0": "precious",
        "rank-0.txt": "precious",
    }


def test_where_nothing_is_to_be_ended_only_the_heartbeat_is_written(tmp_path: Path) -> None:
    before, others = signal.getsignal(signal.SIGUSR1), children_of(os.getpid())
    with watched(tmp_path, TIMEOUTS, rank=0, enabled=False) as heartbeat:
        heartbeat.at("data", 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["heartbeat"]
        assert children_of(os.getpid()) == others
    assert signal.getsignal(signal.SIGUSR1) == before


@LINUX
def test_a_watched_run_that_ends_leaves_no_process_and_no_empty_file(tmp_path: Path) -> None:
    others = set(children_of(os.getpid()))  # servers of earlier tests
    with watched(tmp_path, TIMEOUTS, rank=0):
        (dog,) = set(children_of(os.getpid())) - others
        assert (tmp_path / "stacks/rank-0.txt").exists()
    assert not runs(int(dog))
    assert list((tmp_path / "stacks").iterdir()) == []
    assert not faulthandler.unregister(signal.SIGUSR1), "still answered"  # type: ignore[func-returns-value]
    assert read(tmp_path / "heartbeat/rank-0").phase == "done"


ASKED_TO_STOP = """
import os, signal, sys
from trainer.watchdog import watch
watch._look = lambda *_: os.kill(os.getpid(), signal.SIGINT)
watch.main(sys.argv[1:])
"""


@LINUX
def test_the_watchdog_ends_at_a_sigint_without_a_traceback(tmp_path: Path) -> None:
    words = [str(tmp_path), "0", "1", str(os.getpid()), str(ProcessId.own())]
    done = subprocess.run([sys.executable, "-c", ASKED_TO_STOP, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
