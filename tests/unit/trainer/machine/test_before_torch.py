"""Compiled code is read only from a folder that no other user can write into."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import ConfigError
from tests.support.runs import ROOT
from trainer.machine import before_torch
from trainer.machine.before_torch import CACHE_FOLDERS, check_private, use_private_caches

ANOTHER_USER = 4711

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an environment without cache folders and with a new home folder."""
    for name in (*CACHE_FOLDERS, "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # monkeypatch then restores what the test sets
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process. Only `environment` names cache folders."""
    clean = {name: value for name, value in os.environ.items() if name not in (*CACHE_FOLDERS, "XDG_CACHE_HOME")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=clean | environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_caches_lie_below_a_folder_of_this_user_alone(home: Path) -> None:
    use_private_caches()
    mine = home / ".cache" / f"trainer-{os.geteuid()}"
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    assert {Path(os.environ[name]).parent for name in CACHE_FOLDERS} == {mine}


def test_a_shared_cache_folder_holds_one_folder_for_each_user(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "cache"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    use_private_caches()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == shared / f"trainer-{os.geteuid()}" / "inductor"


def test_every_command_has_inductor_use_the_private_folder(tmp_path: Path) -> None:
    """torch's default is a folder in /tmp, which another user can create first."""
    code = "from trainer.__main__ import main\nmain(['schema', '--env'])\n"
    code += "from torch._inductor.codecache import cache_dir\nprint(cache_dir())"
    done = python(code, HOME=str(tmp_path), TMPDIR=str(tmp_path))
    assert Path(done.stdout.splitlines()[-1]).parent == tmp_path / ".cache" / f"trainer-{os.geteuid()}", done.stderr


@as_root
def test_a_folder_that_another_user_made_beforehand_is_not_used(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(before_torch.atexit, "register", lambda *_, **__: None)
    planted = home / ".cache" / "trainer-0"
    planted.mkdir(parents=True)
    os.chown(planted, ANOTHER_USER, ANOTHER_USER)
    use_private_caches()
    used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert used != planted
    assert (used.stat().st_uid, stat.S_IMODE(used.stat().st_mode)) == (0, 0o700)
    assert f"{planted} belongs to user {ANOTHER_USER}" in caplog.text
    used.rmdir()


@as_root
def test_a_folder_of_another_user_that_the_environment_names_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = home / "planted"
    planted.mkdir()
    os.chown(planted, ANOTHER_USER, ANOTHER_USER)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(planted))
    with pytest.raises(ConfigError, match=r"TORCHINDUCTOR_CACHE_DIR = .*belongs to user 4711"):
        use_private_caches()


@as_root
def test_a_folder_in_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, ANOTHER_USER, ANOTHER_USER)
    with pytest.raises(OSError, match="other users can replace"):
        check_private(tmp_path / "mine")


def test_what_others_can_write_into_or_replace_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(OSError, match="other users can write into"):
        check_private(tmp_path / "open")
    with pytest.raises(OSError, match="other users can replace"):
        check_private(tmp_path / "open" / "mine")
    (tmp_path / "open").chmod(0o1777)
    check_private(tmp_path / "open" / "theirs-is-not-mine")
    (tmp_path / "link").symlink_to(tmp_path / "open" / "mine")
    with pytest.raises(OSError, match="is a symbolic link"):
        check_private(tmp_path / "link")


def test_without_a_home_the_caches_last_as_long_as_the_process(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = (
        "import os\n"
        "from trainer.machine.before_torch import use_private_caches\nuse_private_caches()\nprint(os.environ['CUDA_CACHE_PATH'])"
    )
    done = python(code, HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path))
    used = Path(done.stdout.splitlines()[-1])
    assert used.parent.parent == tmp_path, (done.stdout, done.stderr)
    assert not used.parent.exists()
    assert "compiled code is not cached" in done.stderr
