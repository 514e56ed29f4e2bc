"""The entrypoints as scripts, with a stand-in for Python that prints its arguments. No engine is needed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError, ExitCode, NextStart
from data_pipeline.commands.table import COMMANDS as DATA_COMMANDS
from data_pipeline.dataset.locks import replacing
from entrypoints.healthcheck import run_of_the_launcher
from tests.support.two_ranks import has_ended, seconds_until
from trainer.launch.command import COMMANDS
from trainer.watchdog.heartbeat import Heartbeat, HeartbeatWriter, Timeouts
from trainer.watchdog.processes import ProcessId

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "entrypoints/train"

SLURM = {"SLURM_JOB_NODELIST": "gpu[03-04,09]", "SLURM_NNODES": "3", "SLURM_NODEID": "1"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}


LAUNCHER_OF_A_STAND_IN = """
import runpy, sys
sys.executable = sys.argv.pop(1)
runpy.run_module("trainer.launch", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program that replaces Python: it prints its arguments and variables, and then runs $STAND_IN_DOES.

    It runs the launcher in the real Python. The launcher in turn starts the stand-in instead of Python.
    """
    path = tmp_path / "python"
    path.write_text(
        "#!/usr/bin/env bash\n"
        f"launcher={shlex.quote(LAUNCHER_OF_A_STAND_IN)}\n"
        f'[ "$1 $2" != "-m trainer.launch" ] || exec {sys.executable} -c "$launcher" "$0" "${{@:3}}"\n'
        'echo "arguments: $*"\n'
        "env | grep -E '^(PET_|OMP_NUM_THREADS=|TRAINER_EXIT_FILE=)' || true\n"
        'eval "${STAND_IN_DOES:-}"\n'
    )
    path.chmod(0o755)
    return path


def environment(stand_in: Path, **variables: str) -> dict[str, str]:
    own = ("RUN_NAME", "DATA_NAME", "PET_", "SLURM_", "SKYPILOT_", "TRAIN", "PREP_", "OMP_", "CPU_RANKS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PYTHON": str(stand_in), **variables}


def run(stand_in: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment(stand_in, **variables), capture_output=True, text=True, timeout=60, check=False)


@contextlib.contextmanager
def started_train(variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the entrypoint of `train`, and kill it at the end of the block if it still runs.

    A shell starts background jobs with SIGINT ignored. Children inherit this, and bash cannot trap an ignored signal. `env` resets
    it.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=INT,QUIT", TRAIN],
        env=variables,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def variables_of(stand_in: Path, **variables: str) -> dict[str, str]:
    output = run(stand_in, str(TRAIN), **variables).stdout
    return dict(line.split("=", 1) for line in output.splitlines() if "=" in line)


def test_train_starts_torchrun_with_the_trainers_options(stand_in: Path) -> None:
    for arguments in ((), ("train",), ("--limits.steps", "5"), ("train", "--limits.steps", "5")):
        result = run(stand_in, str(TRAIN), *arguments)
        options = [argument for argument in arguments if argument != "train"]
        expected = " ".join(["-m trainer.launch.torchrun -m trainer train", *options])
        assert result.stdout.splitlines()[0] == f"arguments: {expected}"


def test_train_runs_other_commands_of_the_trainer_in_one_process(stand_in: Path) -> None:
    result = run(stand_in, str(TRAIN), "generate", "--prompt", "two words")
    assert result.stdout.splitlines()[0] == "arguments: -m trainer generate --prompt two words"
    assert run(stand_in, str(TRAIN), "--help").stdout.splitlines()[0] == "arguments: -m trainer train --help"


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"train"}))
def test_train_knows_every_command_of_its_package(stand_in: Path, command: str) -> None:
    assert run(stand_in, str(TRAIN), command, "/r").stdout.startswith(f"arguments: -m trainer {command} /r\n")


def test_train_runs_anything_else_as_it_stands(stand_in: Path) -> None:
    assert run(stand_in, str(TRAIN), "echo", "a  b").stdout == "a  b\n"


@pytest.mark.parametrize("entrypoint", ["train", "data-prep"])
def test_the_options_of_a_service_are_split_as_a_shell_does_and_used_if_the_command_line_has_none(entrypoint: str) -> None:
    command = [str(ROOT / "entrypoints" / entrypoint)]
    variables = environment(Path(sys.executable), SERVICE_ARGS="env printf '%s|' 'a b' \"c\\\"d\" $(id) e\\ f")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == 'a b|c"d|$(id)|e f|'
    other = subprocess.run([*command, "echo", "own"], env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert other.stdout == "own\n"


def test_an_entrypoint_may_open_as_many_files_as_the_hard_limit_allows(stand_in: Path) -> None:
    command = ("bash", "-c", f"ulimit -S -n 64; exec {TRAIN} bash -c 'ulimit -S -n; ulimit -H -n'")
    soft, hard = run(stand_in, *command).stdout.split()
    assert soft == hard


def test_train_says_that_it_starts_before_it_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch')")
    settings = {"TRAIN_DATA": "data", "TRAIN_RUN": str(tmp_path / "run"), "TRAIN_LIMITS__STEPS": "1", "CPU_RANKS": "2"}
    said = run(Path(sys.executable), str(TRAIN), PYTHONPATH=f"{ROOT}:{tmp_path}", **settings).stderr.splitlines()
    assert said[0] == "train: starting ranks: 2; loading PyTorch first, which takes seconds to a minute"
    assert said[1].startswith("error: a module cannot be loaded: ")


def test_data_prep_prepares_unless_told_otherwise(stand_in: Path) -> None:
    data_prep = str(ROOT / "entrypoints/data-prep")
    assert run(stand_in, data_prep).stdout.startswith("arguments: -m data_pipeline prepare\n")
    assert run(stand_in, data_prep, "--workers", "2").stdout.startswith("arguments: -m data_pipeline prepare --workers 2\n")
    assert run(stand_in, data_prep, "inspect", "/d").stdout.startswith("arguments: -m data_pipeline inspect /d\n")
    assert run(stand_in, data_prep, "echo", "hello").stdout == "hello\n"


@pytest.mark.parametrize("command", DATA_COMMANDS)
def test_data_prep_knows_every_command_of_its_package(stand_in: Path, command: str) -> None:
    printed = run(stand_in, str(ROOT / "entrypoints/data-prep"), command, "/d").stdout
    assert printed.startswith(f"arguments: -m data_pipeline {command} /d\n")


def test_one_machine_needs_no_setting(stand_in: Path) -> None:
    found = variables_of(stand_in, CPU_RANKS="2")
    assert found["PET_NPROC_PER_NODE"] == "2"
    assert int(found["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert "PET_NNODES" not in found
    assert int(found["PET_SHUTDOWN_TIMEOUT"]) == 60


def test_slurm_is_translated(stand_in: Path) -> None:
    found = variables_of(stand_in, **SLURM)
    assert (found["PET_NNODES"], found["PET_NODE_RANK"], found["PET_MASTER_ADDR"]) == ("3", "1", "gpu03")


def test_skypilot_is_translated(stand_in: Path) -> None:
    found = variables_of(stand_in, **SKYPILOT)
    assert (found["PET_NNODES"], found["PET_NODE_RANK"], found["PET_MASTER_ADDR"]) == ("2", "1", "10.0.0.4")
    assert found["PET_NPROC_PER_NODE"] == "8"


@pytest.mark.parametrize("launcher", [{}, SLURM, SKYPILOT], ids=["none", "slurm", "skypilot"])
def test_a_variable_of_torchrun_that_is_set_is_never_changed(stand_in: Path, launcher: dict[str, str]) -> None:
    own = {
        "PET_NNODES": "5",
        "PET_NODE_RANK": "4",
        "PET_MASTER_ADDR": "kubeflow-0",
        "PET_NPROC_PER_NODE": "3",
        "PET_SHUTDOWN_TIMEOUT": "9",
        "OMP_NUM_THREADS": "7",
    }
    found = variables_of(stand_in, **launcher, **own)
    assert {name: found[name] for name in own} == own


def test_the_exit_code_is_the_trainers_where_it_named_one(stand_in: Path) -> None:
    assert run(stand_in, str(TRAIN), STAND_IN_DOES="echo 3 >$TRAINER_EXIT_FILE; exit 1").returncode == 3
    assert run(stand_in, str(TRAIN), STAND_IN_DOES="exit 1", TRAIN_MAX_RESTARTS="0").returncode == 1
    assert run(stand_in, str(TRAIN), STAND_IN_DOES="echo 75 >$TRAINER_EXIT_FILE; exit 0").returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_torchrun_once_and_its_save_is_waited_for(stand_in: Path, tmp_path: Path, sent: signal.Signals) -> None:
    log = tmp_path / "log"
    saving = f"trap 'echo got >>{log}; sleep 1; echo saved >>{log}; echo 75 >$TRAINER_EXIT_FILE; exit 1' TERM; echo up >>{log}; "
    variables = environment(stand_in, STAND_IN_DOES=saving + "while :; do sleep 0.1; done")
    with started_train(variables) as process:
        seconds_until(log.exists, 60)
        process.send_signal(sent)
        time.sleep(0.3)
        process.send_signal(sent)
        assert process.wait(timeout=60) == 75
    assert log.read_text().split() == ["up", "got", "saved"]


def test_the_exit_code_of_torchrun_is_not_lost_when_a_signal_ends_the_wait_for_it(stand_in: Path, tmp_path: Path) -> None:
    up = tmp_path / "up"
    does = f"trap 'sleep 0.5; exit 3' TERM; touch {up}; while :; do sleep 0.1; done"
    with started_train(environment(stand_in, STAND_IN_DOES=does)) as process:
        seconds_until(up.exists, 60)
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(timeout=60) == 3


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_torchrun_that_a_signal_ends_before_there_are_ranks_was_stopped_and_is_not_started_again(
    stand_in: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    number, code, said = starts(stand_in, tmp_path, f"trap - {sent.name[3:]}; kill -{sent.name[3:]} $$; sleep 9")
    assert (number, code, said) == (1, 75, "train: stopped before a rank was started; no file was changed\n")


def test_torchrun_does_not_outlive_a_killed_entrypoint(stand_in: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    variables = environment(stand_in, STAND_IN_DOES=f"trap '' TERM; echo $$ >{pid_file}; while :; do sleep 0.1; done")
    with started_train(variables) as process:
        seconds_until(lambda: pid_file.exists() and pid_file.read_text().strip(), 60)
        process.kill()
    pid = int(pid_file.read_text())
    try:
        seconds_until(lambda: has_ended(pid), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def health(run_directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(Path(sys.executable), str(ROOT / "entrypoints/healthcheck"), TRAIN_RUN=str(run_directory), **variables)


def starting(run_directory: Path, why: str = "") -> tuple[int, str]:
    """Return exit code and output of the health check before a rank has started."""
    return 1, f"starting: no rank of {run_directory} is running in this container yet{why}\n"


def test_health_is_the_age_of_the_newest_heartbeat_of_a_rank_that_is_running(tmp_path: Path) -> None:
    missing = health(tmp_path)
    assert (missing.returncode, missing.stdout) == starting(tmp_path)
    with contextlib.ExitStack() as stack:
        for rank, age_s in ((0, 5), (1, 500)):
            path = tmp_path / f"heartbeat/rank-{rank}"
            stack.callback(HeartbeatWriter(path, Timeouts(None, 600)).close)
            os.utime(path, (time.time() - age_s,) * 2)
        fresh = health(tmp_path)
        assert fresh.returncode == 0
        assert re.fullmatch(r"last heartbeat \d+ s ago \(at most 300 s is healthy\), in phase loading of step 0\n", fresh.stdout)
        assert health(tmp_path, HEARTBEAT_MAX_AGE_S="3").returncode == 1
    done = health(tmp_path)
    assert (done.returncode, done.stdout) == starting(tmp_path, " (rank 0: it is done)")


def test_heartbeats_of_an_earlier_container_say_nothing_about_this_one(tmp_path: Path) -> None:
    """The process that wrote them has ended, or its number now belongs to another process, in this container or another."""
    imports = "import pathlib, sys; from trainer.watchdog.heartbeat import HeartbeatWriter, Timeouts"
    wrote = f"{imports}; HeartbeatWriter(pathlib.Path(sys.argv[1]), Timeouts(None, 600))"
    path = tmp_path / "heartbeat/rank-0"
    subprocess.run([sys.executable, "-S", "-c", wrote, path], cwd=ROOT, check=True)
    beat = Heartbeat.from_bytes(path.read_bytes())
    assert beat is not None
    found = health(tmp_path)
    assert (found.returncode, found.stdout) == starting(tmp_path, f" (rank 0: its process {beat.pid} has ended)")
    own = ProcessId.own()
    boot, _, namespace = beat.container.partition(":")
    for changed, why in (
        (replace(beat, pid=own.pid), f"its process {own.pid} has ended"),
        (replace(beat, pid=own.pid, started=own.started), f"process {own.pid}, which its heartbeat names, is not this rank"),
        (replace(beat, container=f"{boot}:{int(namespace) + 1}"), "it belongs to another container"),
        (replace(beat, container=f"other:{namespace}"), "it belongs to another machine, or to an earlier start of this one"),
        (replace(beat, container=""), "it belongs to another machine, or to an earlier start of this one"),
    ):
        path.write_bytes(changed.to_bytes())
        found = health(tmp_path)
        assert (found.returncode, found.stdout) == starting(tmp_path, f" (rank 0: {why})")


@pytest.mark.parametrize("limit", ["", "many", "UID[$(touch mark)]"])
def test_the_health_check_refuses_what_is_no_number_of_seconds(tmp_path: Path, limit: str) -> None:
    result = health(tmp_path, HEARTBEAT_MAX_AGE_S=limit)
    assert result.returncode == 1
    assert ("starting: " if limit == "" else "must be a number of seconds") in result.stdout


def test_the_health_of_a_container_without_compose_is_that_of_the_run_which_its_launcher_names(tmp_path: Path) -> None:
    """The image alone sets no TRAIN_RUN. A container that only prepares, or shows TensorBoard, is healthy."""
    words = ("python", "-m", "trainer.launch", "--recipe", "demo", "--run", str(tmp_path / "a run"))
    for number, command in enumerate((("tini", "--", "x"), words)):
        (tmp_path / f"proc/{number + 1}").mkdir(parents=True)
        (tmp_path / f"proc/{number + 1}/cmdline").write_bytes(b"\0".join(word.encode() for word in command) + b"\0")
    assert run_of_the_launcher(tmp_path / "proc") == str(tmp_path / "a run")
    assert run_of_the_launcher(tmp_path / "empty") == ""
    if run_of_the_launcher(Path("/proc")):
        pytest.skip("a training runs on this machine, which is not in a container")
    none = run(Path(sys.executable), str(ROOT / "entrypoints/healthcheck"), TRAIN_RUN="")
    assert (none.returncode, none.stdout) == (0, "no training was started in this container\n")


def test_the_health_check_runs_nothing_that_a_file_name_says(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "heartbeat").mkdir()
    for word in (f"UID[$(>{mark.name})]", "-f", "$(id)", "9999999999"):
        (tmp_path / "heartbeat" / f"rank-0\n9999999999+{word}").touch()
    command = [ROOT / "entrypoints/healthcheck"]
    variables = environment(Path(sys.executable), TRAIN_RUN=str(tmp_path))
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert not mark.exists(), "a file name was run as a command"
    assert (result.returncode, result.stdout) == starting(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "folder of links"])
def test_the_health_check_reads_nothing_but_files_of_the_run(tmp_path: Path, kind: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-0").write_text("beat 1 pid 1 started 1 lap 0 step 99 limit_s 1.0 phase save\n")
    run_directory = tmp_path / "run"
    run_directory.mkdir()
    if kind == "folder of links":
        (run_directory / "heartbeat").symlink_to(elsewhere)
    else:
        (run_directory / "heartbeat").mkdir()
        beat = run_directory / "heartbeat/rank-0"
        {"pipe": lambda: os.mkfifo(beat), "link": lambda: beat.symlink_to(elsewhere / "rank-0"), "folder": beat.mkdir}[kind]()
    result = health(run_directory)
    assert (result.returncode, result.stdout) == starting(run_directory), "a file that is not part of the run was read"


def starts(stand_in: Path, folder: Path, does: str, *arguments: str, **variables: str) -> tuple[int, int, str]:
    """Run the entrypoint so that each start of the ranks runs `does` ($n: number of the start).

    Returns:
        The number of starts, the exit code, and stderr.
    """
    count = f"echo start >>{folder}/starts; n=$(wc -l <{folder}/starts); {does}"
    quick = {"TRAIN_RESTART_DELAY_S": "0"} | variables
    result = run(stand_in, str(TRAIN), *arguments, STAND_IN_DOES=count, **quick)
    return len((folder / "starts").read_text().splitlines()), result.returncode, result.stderr


def test_a_group_that_crashes_is_started_again_and_its_end_is_that_of_the_last_start(stand_in: Path, tmp_path: Path) -> None:
    does = "[ $n = 3 ] || kill -9 $$"
    number, code, said = starts(stand_in, tmp_path, does)
    assert (number, code) == (3, 0)
    assert "the ranks ended (code 137); starting again" in said
    assert "(restart 2 of 3 without a new one, as far as is known without --run)" in said


@pytest.mark.parametrize("code", [code for code in ExitCode if code.next_start in (NextStart.USELESS, NextStart.CONTINUES)])
def test_a_group_that_ends_for_a_reason_that_stays_is_not_started_again(stand_in: Path, tmp_path: Path, code: int) -> None:
    number, found, said = starts(stand_in, tmp_path, f"echo {code} >$TRAINER_EXIT_FILE; exit 1")
    assert (number, found, said) == (1, code, "")


def test_what_one_start_has_said_is_forgotten_at_the_next(stand_in: Path, tmp_path: Path) -> None:
    does = "[ $n = 1 ] && reason='1 stuck' || reason=3; [ -s $TRAINER_EXIT_FILE ] || echo $reason >$TRAINER_EXIT_FILE; exit 1"
    assert starts(stand_in, tmp_path, does)[:2] == (2, 3)


def test_restarts_without_a_new_checkpoint_come_to_an_end(stand_in: Path, tmp_path: Path) -> None:
    reason = "echo '1 rank 1 has stood still' >$TRAINER_EXIT_FILE; exit 1"
    number, code, said = starts(stand_in, tmp_path, reason, TRAIN_MAX_RESTARTS="2")
    assert (number, code) == (3, 1)
    assert said.count("the ranks ended (rank 1 has stood still); starting again") == 2
    assert said.endswith("train: not started again: 2 restarts have made no new checkpoint, as far as is known without --run\n")
    for does in ("exit 1", "kill -9 $$"):
        (tmp_path / "starts").unlink()
        number, code, said = starts(stand_in, tmp_path, does, TRAIN_MAX_RESTARTS="0")
        assert (number, code, "starting again" in said) == (1, 1, False)


@pytest.mark.parametrize("how", ["environment", "two words", "one word"])
def test_a_new_checkpoint_gives_all_restarts_back(stand_in: Path, tmp_path: Path, how: str) -> None:
    run_directory = tmp_path / "a run"
    arguments = {"environment": (), "two words": ("--run", str(run_directory)), "one word": (f"--run={run_directory}",)}[how]
    variables = {"TRAIN_RUN": str(run_directory)} if how == "environment" else {}
    does = f"[ $n -gt 4 ] || mkdir -p '{run_directory}/checkpoints/step-0000000'$n; exit 1"
    number, code, _ = starts(stand_in, tmp_path, does, *arguments, TRAIN_MAX_RESTARTS="1", **variables)
    assert (number, code) == (4 + 1, 1)


def test_several_nodes_are_restarted_by_their_scheduler(stand_in: Path, tmp_path: Path) -> None:
    assert starts(stand_in, tmp_path, "exit 1", **SLURM)[:2] == (1, 1)
    (tmp_path / "starts").unlink()
    assert starts(stand_in, tmp_path, "exit 1", TRAIN_MAX_RESTARTS="1", **SLURM)[:2] == (2, 1)


def test_the_settings_of_restarts_do_not_reach_the_trainer(stand_in: Path, tmp_path: Path) -> None:
    does = f"env | grep -E '^TRAIN_(MAX|RESTART)' >{tmp_path}/found || true"
    assert starts(stand_in, tmp_path, does, TRAIN_MAX_RESTARTS="1")[1] == 0
    assert (tmp_path / "found").read_text() == ""
    refused = run(stand_in, str(TRAIN), TRAIN_MAX_RESTARTS="many")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "TRAIN_MAX_RESTARTS = many" in refused.stderr


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_pause_before_a_restart_ends_it_at_once(stand_in: Path, tmp_path: Path, sent: signal.Signals) -> None:
    variables = environment(stand_in, STAND_IN_DOES=f"echo start >>{tmp_path}/starts; exit 1", TRAIN_RESTART_DELAY_S="301")
    with started_train(variables) as process:
        seconds_until((tmp_path / "starts").exists, 60)
        time.sleep(0.5)
        process.send_signal(sent)
        assert process.wait(timeout=60) == 75
    assert (tmp_path / "starts").read_text() == "start\n"


@pytest.mark.parametrize("how", ["environment", "arguments"])
def test_the_data_is_not_replaced_in_the_pause_before_a_restart(stand_in: Path, tmp_path: Path, how: str) -> None:
    data = tmp_path / "prepared data"
    data.mkdir()
    arguments = ("--data", str(data)) if how == "arguments" else ()
    variables = environment(
        stand_in, STAND_IN_DOES="exit 1", TRAIN_RESTART_DELAY_S="302", **({} if arguments else {"TRAIN_DATA": str(data)})
    )
    with subprocess.Popen([TRAIN, *arguments], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            assert b"starting again from the newest checkpoint in 302 s" in process.stderr.readline()
            with pytest.raises(ConfigError, match="in use by another process"), replacing(data):
                pass
        finally:
            process.kill()  # a pause that continued in a child would keep the data locked
    with replacing(data):
        pass


SLOW_START = """
import os, pathlib, sys, time
if "trainer.launch" in " ".join(sys.orig_argv):
    begun = pathlib.Path(os.environ["BEGUN"])
    begun.touch()
    while begun.exists():
        time.sleep(0.01)
"""
"""Python runs this before the launcher, which then has not installed its signal handlers yet."""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("whole_group", [False, True], ids=["the entrypoint", "its process group"])
def test_a_signal_while_the_launcher_is_loaded_starts_nothing(
    stand_in: Path, tmp_path: Path, sent: signal.Signals, whole_group: bool
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/sitecustomize.py").write_text(SLOW_START)
    begun = tmp_path / "begun"
    variables = {"BEGUN": str(begun), "PYTHONPATH": f"{tmp_path}/modules", "STAND_IN_DOES": f"touch {tmp_path}/started"}
    with started_train(environment(stand_in, **variables)) as process:
        seconds_until(begun.exists, 60)
        if whole_group:  # as with Ctrl-C in a terminal
            os.killpg(process.pid, sent)
        else:
            process.send_signal(sent)
        begun.unlink()
        assert process.wait(timeout=60) == 75
    assert not (tmp_path / "started").exists()


def test_a_signal_that_is_ignored_when_the_launcher_starts_stays_ignored(stand_in: Path, tmp_path: Path) -> None:
    """As with `nohup` when the terminal is closed."""
    up, go_on = tmp_path / "up", tmp_path / "go on"
    does = f"trap 'exit 9' TERM; touch {up}; until [ -e '{go_on}' ]; do sleep 0.1; done"
    with subprocess.Popen(
        ["env", "--ignore-signal=HUP", TRAIN], env=environment(stand_in, STAND_IN_DOES=does), stdout=subprocess.DEVNULL
    ) as process:
        try:
            seconds_until(up.exists, 60)
            process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            go_on.touch()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


def test_exit_codes_are_kept_where_the_parent_ignores_the_end_of_its_children(stand_in: Path, tmp_path: Path) -> None:
    command = ("env", "--ignore-signal=CHLD", str(TRAIN))
    assert run(stand_in, *command, STAND_IN_DOES="echo 4 >$TRAINER_EXIT_FILE; exit 1").returncode == 4


SIGNALS_OF_A_PROGRAM = "grep -E '^Sig(Ign|Blk):' /proc/self/status"


def test_a_program_has_the_signals_of_the_entrypoint(stand_in: Path) -> None:
    """Python ignores some signals, and the entrypoint blocks some. A program must inherit neither."""
    plain = ["env", "--default-signal=PIPE,XFSZ,INT,QUIT", "bash", "-c", SIGNALS_OF_A_PROGRAM]
    expected = subprocess.run(plain, capture_output=True, text=True, check=True).stdout
    assert run(stand_in, *plain[:2], str(TRAIN), *plain[2:]).stdout == expected


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/", 126)])
def test_a_word_that_is_neither_a_command_nor_a_program_has_the_exit_code_of_a_shell(
    stand_in: Path, program: str, code: int
) -> None:
    refused = run(stand_in, str(TRAIN), program)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1)
    assert refused.stderr.startswith(f"error: {program} is neither a command nor a program that can be started (")
    assert "generate" in refused.stderr


@pytest.mark.parametrize(
    "setting",
    [
        "CPU_RANKS=0",
        "CPU_RANKS=two",
        "CPU_RANKS=08x",
        "OMP_NUM_THREADS=abc",
        "PET_NNODES=x",
        "PET_NPROC_PER_NODE=0",
        "TMPDIR=/no/such",
    ],
)
def test_a_variable_that_cannot_be_meant_is_a_wrong_setting_and_no_crash(setting: str) -> None:
    name, _, value = setting.partition("=")
    refused = run(Path(sys.executable), str(TRAIN), "--run", "/nowhere", **{name: value})
    assert refused.returncode == ExitCode.CONFIG
    assert f"error: {name} = {value}" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
    assert "starting again" not in refused.stderr


def test_a_python_that_is_not_there_is_a_wrong_setting(tmp_path: Path) -> None:
    refused = run(tmp_path / "python", str(TRAIN))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert f"error: PYTHON = {tmp_path}/python is not a program" in refused.stderr


BROKEN_MODULES = {
    "torch is missing": ("torch.py", "raise ModuleNotFoundError(\"No module named 'torch'\")"),
    "torch finds no library": ("torch.py", "raise OSError('libcudart.so.13: cannot open shared object file')"),
    "pydantic is of another version": ("pydantic.py", "raise AttributeError('no such name')"),
    "a line is no Python": ("pydantic.py", "def f(:"),
}


@pytest.mark.parametrize("broken", BROKEN_MODULES)
def test_a_module_that_cannot_be_loaded_is_one_line_and_starts_nothing_again(tmp_path: Path, broken: str) -> None:
    name, text = BROKEN_MODULES[broken]
    (tmp_path / name).write_text(text)
    command = [str(TRAIN)] if name == "torch.py" else [sys.executable, "-m", "trainer", "train"]  # as the launcher starts a rank
    settings = {
        "PYTHONPATH": f"{ROOT}:{tmp_path}",
        "TRAIN_DATA": "data",
        "TRAIN_RUN": str(tmp_path / "run"),
        "TRAIN_LIMITS__STEPS": "1",
    }
    refused = run(Path(sys.executable), *command, **settings)
    assert (refused.returncode, refused.stderr.count("error: ")) == (ExitCode.CONFIG, 1), refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: a module cannot be loaded: ")
    assert str(tmp_path / name) in refused.stderr


PLANTED = "import os; open(os.environ['MARK'], 'a').write(__name__ + ' ')\n"
"""Code that a stranger leaves in a folder, in files named like the modules that the commands import."""


@pytest.mark.parametrize("python_path", ["", ":a::b:"])
@pytest.mark.parametrize(
    "command",
    [
        ("train", "schema"),
        ("train", "--help"),
        ("train", "--limits.steps", "1", "--data", "data", "--run", "run"),
        ("data-prep", "schema"),
        ("data-prep", "inspect", "."),
        ("healthcheck",),
        ("tensorboard", "--version"),
        ("versions",),
    ],
    ids=" ".join,
)
def test_an_entrypoint_imports_nothing_from_the_folder_in_which_it_is_started(
    tmp_path: Path, command: tuple[str, ...], python_path: str
) -> None:
    mark = tmp_path / "mark"
    for name in (
        "zstandard",
        "pyarrow",
        "numpy",
        "pydantic",
        "torch",
        "trainer",
        "data_pipeline",
        "psutil",
        "tensorboard",
        "platform",
    ):
        (tmp_path / f"{name}.py").write_text(PLANTED)
    variables = environment(Path(sys.executable), MARK=str(mark), PYTHONPATH=python_path, TRAIN_MAX_RESTARTS="0", TRAIN_RUN=".")
    if command[0] == "train":
        del variables["TRAIN_RUN"]
    subprocess.run(
        [ROOT / "entrypoints" / command[0], *command[1:]],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert not mark.exists(), f"{mark.read_text()}was imported from the working directory"


def test_tensorboard_is_on_loopback_unless_asked(stand_in: Path) -> None:
    def host(*arguments: str) -> str:
        words = run(stand_in, str(ROOT / "entrypoints/tensorboard"), *arguments).stdout.split()
        return " ".join(words[words.index("-m") :])

    assert "--host 127.0.0.1" in host()
    assert "--host 127.0.0.1" in host("--reload_interval", "9")
    for asked in (["--bind_all"], ["--host", "10.0.0.4"], ["--host=10.0.0.4"]):
        assert host(*asked).endswith(" ".join(asked))
        assert "127.0.0.1" not in host(*asked)


@pytest.mark.parametrize("name", ["../../etc", "..", ".", "/etc", "a/../../b", "a//b", "a/", "a/.", "$(id)/.."])
def test_a_run_name_that_leads_out_of_the_runs_folder_is_refused(stand_in: Path, name: str) -> None:
    for arguments in ((), ("generate",), ("bash", "-c", "echo started")):
        result = run(stand_in, str(TRAIN), *arguments, RUN_NAME=name, TRAIN_RUN=f"/workspace/runs/{name}")
        assert (result.returncode, result.stdout) == (2, "")
        assert "RUN_NAME = " in result.stderr


@pytest.mark.parametrize("name", ["", "demo", "second run", "sweep/lr-1", "..a", "a..", "v1.0"])
def test_a_run_name_within_the_runs_folder_is_taken(stand_in: Path, name: str) -> None:
    assert run(stand_in, str(TRAIN), RUN_NAME=name).returncode == 0


@pytest.mark.parametrize("entrypoint", ["train", "data-prep"])
@pytest.mark.parametrize("name", ["..", ".", "/etc", "a/b", "a/", "$(id)/.."])
def test_a_name_of_data_that_is_not_one_folder_is_refused(stand_in: Path, entrypoint: str, name: str) -> None:
    result = run(stand_in, str(ROOT / "entrypoints" / entrypoint), DATA_NAME=name)
    assert (result.returncode, result.stdout) == (2, "")
    assert "DATA_NAME = " in result.stderr
    assert run(stand_in, str(ROOT / "entrypoints" / entrypoint), DATA_NAME="web-2024.v1").returncode == 0


@pytest.mark.parametrize("name", ["a[$(touch mark)]", "UID[$(touch mark)]", "A[0]", "A+", "$(touch mark)", "", "a b", "A\nB"])
def test_a_name_of_a_setting_that_is_no_name_is_refused_and_not_run(stand_in: Path, tmp_path: Path, name: str) -> None:
    variables = environment(stand_in, FROM_ENV_FILE=f"TRAIN_SEED=1\x1f{name}=1\x1f")
    done = subprocess.run([TRAIN], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert not (tmp_path / "mark").exists(), "the name was run as a command"
    assert (done.returncode, done.stdout) == (ExitCode.CONFIG, "")
    assert "FROM_ENV_FILE has the name " in done.stderr


ENTRYPOINTS = sorted(path.name for path in (ROOT / "entrypoints").iterdir() if os.access(path, os.X_OK) and path.is_file())


@pytest.mark.parametrize("name", ENTRYPOINTS)
def test_an_entrypoint_runs_nothing_that_the_value_of_a_variable_says(stand_in: Path, tmp_path: Path, name: str) -> None:
    """Each variable that the scripts read has a value that bash runs if it takes it for a number, a name or a command."""
    scripts = "".join((ROOT / "entrypoints" / one).read_text() for one in (name, "environment"))
    read = set(re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", scripts)) - {"PYTHON"}
    assert {"RUN_NAME", "DATA_NAME", "FROM_ENV_FILE"} <= read
    for variable in read:
        value = "UID[$(touch mark)]" if variable != "FROM_ENV_FILE" else "TRAIN_SEED=UID[$(touch mark)]\x1f"
        variables = environment(stand_in, **{variable: value})
        subprocess.run([ROOT / "entrypoints" / name], cwd=tmp_path, env=variables, capture_output=True, timeout=60, check=False)
    assert not (tmp_path / "mark").exists(), "a value was run as a command"


@pytest.fixture
def clone(tmp_path: Path, stand_in: Path) -> Path:
    """A clone with the entrypoints alone, in which `.venv` has the stand-in as its Python."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "entrypoints", folder / "entrypoints")
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.move(stand_in, folder / ".venv/bin/python")
    return folder


def run_without_python(command: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run([command, *words], env=kept, capture_output=True, text=True, timeout=60, check=False, cwd="/")


@pytest.mark.parametrize("name", ["trainer", "data-prep"])
def test_without_an_active_environment_the_one_of_the_clone_is_used(clone: Path, name: str) -> None:
    done = run_without_python(clone / "entrypoints" / name, "verify", "/d")
    module = {"trainer": "trainer.program", "data-prep": "data_pipeline"}[name]
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"arguments: -m {module} verify /d"), done.stderr


def test_an_active_environment_goes_before_the_one_of_the_clone(clone: Path, tmp_path: Path) -> None:
    active = tmp_path / "active/bin"
    active.mkdir(parents=True)
    (active / "python").write_text("#!/bin/sh\necho active\n")
    (active / "python").chmod(0o755)
    done = run_without_python(clone / "entrypoints/trainer", VIRTUAL_ENV=str(active.parent), PATH=f"{active}:/usr/bin:/bin")
    assert done.stdout == "active\n"


@pytest.mark.parametrize("name", ["trainer", "train", "data-prep", "tensorboard", "versions"])
def test_without_any_python_the_error_is_one_line_with_advice(clone: Path, tmp_path: Path, name: str) -> None:
    (clone / ".venv/bin/python").unlink()
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "tr", "env"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    refused = run_without_python(clone / "entrypoints" / name, PATH=str(tools))
    assert refused.returncode == ExitCode.CONFIG
    assert len(refused.stderr.splitlines()) == 1
    assert "env/make-venv .venv" in refused.stderr
