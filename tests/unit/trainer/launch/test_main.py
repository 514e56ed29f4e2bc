"""The launcher starts at once, and asks torch for the number of GPUs only on a machine that may have one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from common.errors import ConfigError, ExitCode, StorageError
from tests.support.runs import ROOT
from tests.support.signal_handlers import installed_request
from trainer.launch import __main__ as launcher


def test_it_imports_nothing_that_takes_long() -> None:
    heavy = "{'torch', 'pydantic', 'numpy', 'asyncio'}"
    code = f"import sys, trainer.launch.__main__; sys.exit(str({heavy} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, StorageError), (errno.EACCES, ConfigError)])
def test_a_full_disk_of_temporary_files_is_no_wrong_setting(
    code: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
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
def test_ctrl_c_before_the_first_save_is_an_interrupt(
    number: signal.Signals, saved: bool, code: ExitCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if saved:
        (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)

    def stopped(*_arguments: object, **_named: object) -> ExitCode:
        os.kill(os.getpid(), number)
        return ExitCode.STOPPED

    monkeypatch.setenv(launcher.EXIT_FILE_VARIABLE, "")  # `main` sets it
    monkeypatch.setattr(launcher, "supervise", stopped)
    with installed_request():  # puts back the handlers that `main` installs
        assert launcher.main(["train", "--run", str(tmp_path / "run")]) is code
