"""The launcher starts at once, and asks torch for the number of GPUs only on a machine that may have one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError, ExitCode, ProjectError, StoppedBySignal, StorageError
from tests.support.runs import ROOT
from tests.support.signal_handlers import installed_request
from trainer.launch import __main__ as launcher
from trainer.launch.stop_request import StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    with installed_request() as stop:
        yield stop


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script of bash in the place of the process that asks torch, on a machine that may have a GPU."""

    def replace(script: str) -> None:
        monkeypatch.setattr(launcher, "signs_of_gpus", lambda: ["/dev/nvidia0"])
        monkeypatch.setattr(launcher, "num_ranks_command", lambda _: ["bash", "-c", script])

    return replace


def test_it_imports_nothing_that_takes_long() -> None:
    heavy = "{'torch', 'pydantic', 'numpy', 'asyncio'}"
    code = f"import sys, trainer.launch.__main__; sys.exit(str({heavy} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_a_machine_without_signs_of_a_gpu_has_none(stop: StopRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "signs_of_gpus", list)
    monkeypatch.setattr(launcher, "num_ranks_command", lambda _: pytest.fail("torch is asked"))
    assert launcher.count_gpus([], stop) == "0"


def test_the_number_is_what_torch_says(stop: StopRequest, asking: Callable[[str], None]) -> None:
    asking("echo 2")
    assert launcher.count_gpus([], stop) == "2"


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ("exit 2", ConfigError, "^$"),
        ("echo 2; exit 1", ConfigError, "^torch cannot count the GPUs; install the packages"),
        ("kill -9 $$", ProjectError, "^signal 9 ended the process that counts the GPUs"),
    ],
)
def test_an_error_is_said_once(
    script: str, error: type[ProjectError], message: str, stop: StopRequest, asking: Callable[[str], None]
) -> None:
    asking(script)
    with pytest.raises(error, match=message):
        launcher.count_gpus([], stop)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_ends_the_count_and_starts_nothing(
    number: signal.Signals, stop: StopRequest, asking: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    asking(f"kill -{number} $PPID; exec sleep 60")
    with pytest.raises(StoppedBySignal, match=r"^$"):
        launcher.count_gpus([], stop)
    assert capfd.readouterr().err == f"train: {number.name} received; nothing is started any more\n"


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageError), (errno.EACCES, ConfigError)])
def test_a_full_disk_of_temporary_files_is_no_wrong_setting(
    code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(kind, match=r"^TMPDIR = .* must be a folder with free space"), launcher.exit_file():
        pass


@pytest.mark.parametrize(
    ("number", "saved", "code"),
    [
        (signal.SIGINT, False, ExitCode.INTERRUPTED),
        (signal.SIGINT, True, ExitCode.STOPPED),
        (signal.SIGTERM, False, ExitCode.STOPPED),  # engines start a training with this code again
        (signal.SIGTERM, True, ExitCode.STOPPED),
    ],
)
@pytest.mark.parametrize("phase", ["count_gpus", "supervise"])
def test_ctrl_c_before_the_first_save_is_an_interrupt(
    number: signal.Signals, saved: bool, code: ExitCode, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if saved:
        (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)

    def stopped(*_arguments: object, **_named: object) -> ExitCode:
        os.kill(os.getpid(), number)
        if phase == "count_gpus":
            raise StoppedBySignal("")
        return ExitCode.STOPPED

    monkeypatch.setenv(launcher.EXIT_FILE_VARIABLE, "")  # `main` sets it
    monkeypatch.setattr(launcher, "missing_variables", lambda *_: stopped() if phase == "count_gpus" else {})
    monkeypatch.setattr(launcher, "supervise", stopped)
    with installed_request():  # puts back the handlers that `main` installs
        assert launcher.main(["train", "--run", str(tmp_path / "run")]) is code
