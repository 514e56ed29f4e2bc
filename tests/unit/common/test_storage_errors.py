"""Every error about a file that reaches a user is one line with the file, the reason and what to do."""

from __future__ import annotations

import errno
import multiprocessing.synchronize
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import pytest

from common.command_line import run_command
from common.errors import ExitCode
from common.files import open_input
from common.storage_errors import explain_os_error, naming

SIMULATED = {
    errno.ENOSPC: r"no space left on the device, which has [\d.]+ \w+ of [\d.]+ \w+ free; make room there",
    errno.EDQUOT: "the disk quota of this user is used up; remove files",
    errno.EROFS: "its file system is mounted read-only; name a folder",
    errno.EIO: "input/output error, as the device failed to read or write it; look at `dmesg`",
    errno.ESTALE: "the network file system no longer knows it; mount",
    errno.EMFILE: "this process may open no more files; raise `ulimit -n`",
    errno.EBUSY: "something else uses it; end what uses it",
    errno.EFBIG: "larger than the file system or `ulimit -f` allows; use another",
    errno.ETXTBSY: f"{os.strerror(errno.ETXTBSY)}; look at the file and its disk",
}

REAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "ENOENT": (lambda folder: (folder / "no" / "file").open(), "no/file: no such file or folder; check the path"),
    "EISDIR": (lambda folder: folder.open("wb"), "it is a directory, and a file is needed there; move the directory away"),
    "ENOTDIR": (lambda folder: (folder / "file" / "x").open(), "file is a file, and a folder is needed there; move it away"),
    "ELOOP": (lambda folder: (folder / "loop").open(), "a symbolic link on its path cannot be followed; replace the link"),
    "ENAMETOOLONG": (lambda folder: (folder / ("x" * 300)).open(), "longer than the file system allows; use a shorter name"),
    "EEXIST": (lambda folder: folder.mkdir(), "it exists already; move it away"),
    "ENOTEMPTY": (lambda folder: folder.rmdir(), "it is not empty; move away what is in it"),
}


def line_of(capsys: pytest.CaptureFixture[str], action: Callable[[], object]) -> str:
    """What a command prints that ends with the error of an action."""

    def main(_: object) -> None:
        action()

    assert run_command(main, []) == ExitCode.STORAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "Errno" not in line
    return line.removeprefix("error: ")


@pytest.mark.parametrize("code", SIMULATED, ids=errno.errorcode.get)
def test_an_error_of_a_device_says_which_file_why_and_what_to_do(
    code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code), str(tmp_path / "file"))

    line = line_of(capsys, fail)
    assert line.startswith(f"{tmp_path}/file: ")
    assert re.search(SIMULATED[code], line)


@pytest.mark.parametrize("name", REAL)
def test_an_error_of_a_path_says_which_file_why_and_what_to_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    action, expected = REAL[name]
    line = line_of(capsys, lambda: action(tmp_path))
    assert line.startswith(str(tmp_path))
    assert expected in line


@pytest.mark.parametrize("name", ["file", "missing/file"])
def test_a_refusal_names_who_may_not_and_whose_the_file_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o640)
    (tmp_path / "file").chmod(0o640)
    tmp_path.chmod(0o750)
    user, group = os.geteuid(), os.getegid()
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / name))
    blamed, mode = (tmp_path / "file", "640") if name == "file" else (tmp_path, "750")
    what = "it" if name == "file" else blamed
    assert explain_os_error(error) == (
        f"{tmp_path}/{name}: permission denied for user {user}, group {group}, as {what} belongs to user {user}, group {group}, "
        f"with mode {mode}; give this user access to {blamed}, or run as its owner"
    )


@pytest.mark.parametrize(
    ("setting", "owner", "expected"),
    [
        ("WORKSPACE", 0, "on the host, run `chown -R 1234:1234` on the folder or volume that WORKSPACE names"),
        ("WORKSPACE", 7, "on the folder or volume that WORKSPACE names, or set RUN_UID=7 and RUN_GID=8"),
        ("TEXT_DIR", 7, "run `chmod -R a+rX` on the folder or volume that TEXT_DIR names, or set RUN_UID=7 and RUN_GID=8"),
        ("WORKSPACE", 1234, "run `chmod -R u+rwX` on the folder or volume that WORKSPACE names"),
    ],
)
def test_in_a_container_a_refusal_names_the_mount_and_the_setting_that_gives_access(
    setting: str, owner: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.paths._MOUNTS", {str(tmp_path): setting})
    monkeypatch.setattr("os.path.ismount", lambda path: str(path) == str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    monkeypatch.setattr("os.getegid", lambda: 1234)
    status = os.stat_result((0o100600, 0, 0, 1, owner, 8, 0, 0, 0, 0))
    monkeypatch.setattr("pathlib.Path.stat", lambda self: status)
    line = explain_os_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "file")))
    assert f"for user 1234, group 1234, as it belongs to user {owner}, group 8, with mode 600; " in line
    assert line.endswith(expected)


def test_an_error_that_is_about_no_file_is_told_as_it_is() -> None:
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert explain_os_error(refused) == str(refused)
    assert explain_os_error(OSError("words of a library")) == "words of a library"
    web = HTTPError("https://host/a?key=hunter2", 404, "Not Found", None, None)  # type: ignore[arg-type]
    assert explain_os_error(web) == "HTTP Error 404: Not Found"


def test_a_name_is_given_to_errors_of_open_files_alone(tmp_path: Path) -> None:
    for code, own, name in (
        (errno.EIO, (), str(tmp_path)),
        (errno.ENOSPC, ("full", "other"), "other"),
        (errno.ECONNREFUSED, (), None),
    ):
        with pytest.raises(OSError, match=r"\w") as raised, naming(tmp_path):
            raise OSError(code, *(own or ("words",)))
        assert raised.value.filename == name


def test_a_file_of_another_kind_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("elsewhere")
    assert line_of(capsys, lambda: open_input(tmp_path / "pipe")).endswith("pipe is a pipe; a regular file is needed there")
    line = line_of(capsys, lambda: open_input(tmp_path / "link", below=tmp_path))
    assert line.endswith("not opened inside a data or run folder; remove or replace it, and run the same command again")


def test_a_lock_that_finds_no_room_is_about_shared_memory_and_not_about_the_folder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", full)
    with pytest.raises(OSError, match="No space") as caught, naming(tmp_path):
        multiprocessing.Lock()
    assert explain_os_error(caught.value).startswith("/dev/shm: no space left on the device")


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, ValueError])
def test_an_error_of_a_library_about_too_many_open_files_is_one_line(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    def main(_: object) -> None:
        try:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except OSError as error:
            raise kind("a library failed") from error

    assert run_command(main, []) == ExitCode.STORAGE
    assert capsys.readouterr().err.startswith("error: this process may open no more files; raise `ulimit -n`")
