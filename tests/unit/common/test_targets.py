from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import files, targets
from common.command_line import Command, run_command
from common.errors import ConfigError, StoppedBySignal, StorageError
from common.files import unfinished_path
from common.settings.command import loaded, run_listed
from common.settings.model import place_of
from common.targets import Target, check_target, new_folder
from data_pipeline.commands.table import COMMANDS as OF_DATA
from trainer.launch.command import COMMANDS as OF_TRAINER


def a_folder(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    return path


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("a run", ("config.toml", "record.json")),
        ("a run", ("config.toml", ".lock")),
        ("prepared data", (".prepare.lock",)),
        ("prepared data", ("manifest.json", "tokenizer/byte.json")),
        ("an exported model", ("export.json", "config.json")),
    ],
)
@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_target_inside_a_folder_of_the_program_is_refused(
    tmp_path: Path, kind: str, names: tuple[str, ...], target: Target
) -> None:
    folder = a_folder(tmp_path / "one", *names)
    (tmp_path / "link").symlink_to(folder)
    for path in (folder / "new" / "deep", tmp_path / "link" / "new" / "deep", tmp_path / "one" / ".." / "one" / "tokenizer" / "x"):
        with pytest.raises(ConfigError, match=rf"^--output = {re.escape(str(path))} is inside {folder}, which is {kind}; name "):
            check_target(path, "--output", target)


@pytest.mark.parametrize("command", [*OF_TRAINER.values(), *OF_DATA.values()], ids=lambda command: command.name)
def test_every_output_of_a_command_is_checked(command: Command) -> None:
    fields = loaded(command)[0].model_fields
    assert all(place_of(field).target for name, field in fields.items() if name in ("output", "bundle"))


@pytest.mark.parametrize("words", [["export", "x", "--output"], ["train", "--data", "d", "--limits.steps", "1", "--run"]])
def test_a_command_refuses_a_target_inside_a_run_before_it_looks_at_its_input(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_folder(tmp_path / "run", "config.toml", "record.json")
    assert run_command(lambda words: run_listed(OF_TRAINER[words[0]], "trainer", words[1:]), [*words, str(run / "new")]) == 2
    assert f"= {run / 'new'} is inside {run}, which is a run; name a path outside of it" in capsys.readouterr().err
    assert len(list(run.iterdir())) == 2


def test_a_link_to_a_place_inside_a_run_is_refused(tmp_path: Path) -> None:
    run = a_folder(tmp_path / "run", "config.toml", "record.json")
    (tmp_path / "new").symlink_to(run / "checkpoints")
    with pytest.raises(ConfigError, match="is inside"):
        check_target(tmp_path / "new", "--run", "folder")


def test_folders_beside_and_around_a_run_and_a_run_itself_are_allowed(tmp_path: Path) -> None:
    run = a_folder(tmp_path / "runs" / "one", "config.toml", "record.json")
    a_folder(tmp_path, "manifest.json")  # of a web page, say
    older = a_folder(run / "older", "config.toml", "record.json")
    for path in (run, run.parent, run.with_name("two"), tmp_path / "new", older):
        check_target(path, "--run", "folder")


def test_a_page_beside_the_files_of_a_run_is_allowed_and_a_file_of_the_run_is_not_replaced(tmp_path: Path) -> None:
    run = a_folder(tmp_path / "run", "config.toml", "record.json", "report.html")
    for name in ("report.html", "compare.html", "doctor.tar.gz"):
        check_target(run / name, "--output", "file")
    with pytest.raises(ConfigError, match="is inside"):
        check_target(run / "record.json", "--output", "file")


def test_a_new_folder_appears_whole_and_its_name_is_forced_to_the_device_with_those_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_directory", synced.append)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path)
    target = tmp_path / "new" / "deep" / "result"
    with new_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["result"]
    assert synced[-3:] == [target.parent, target.parent.parent, tmp_path]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_removes_an_unfinished_folder_and_keeps_the_one_to_replace(tmp_path: Path, number: int) -> None:
    target = a_folder(tmp_path / "result", "old")

    def write_and_be_stopped() -> None:
        with new_folder(target, replaces=True) as folder:
            (folder / "a").write_text("1")
            os.kill(os.getpid(), number)

    with pytest.raises((StoppedBySignal, KeyboardInterrupt), match="run the same command again"):
        write_and_be_stopped()
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    assert (target / "old").exists()


def test_a_folder_that_a_killed_command_left_is_removed_and_one_in_use_or_of_another_target_is_not(tmp_path: Path) -> None:
    target, other = tmp_path / "re[s]ult", unfinished_path(tmp_path / "other")
    left, used = a_folder(unfinished_path(target), "a"), a_folder(unfinished_path(target), "a")
    a_folder(other, "a")
    lock = os.open(used, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with new_folder(target) as folder:
            assert not left.exists()
            second = new_folder(target)
            with second as other_folder:  # a second command for the same target leaves the folder of the first alone
                assert folder.exists()
                (other_folder / "b").write_text("1")
            folder.rmdir()
            target.rename(tmp_path / "moved")
            folder.mkdir()
    finally:
        os.close(lock)
    assert used.exists()
    assert other.exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_full_disk_is_named_with_the_target_as_long_as_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    def free(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_files=0, f_favail=0, f_bavail=0 if list(tmp_path.iterdir()) else 7, f_blocks=7, f_frsize=1000)

    def fill() -> None:
        with new_folder(tmp_path / "result") as folder:
            (folder / "a").write_text("1")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *((str(folder / "b"),) if named else ()))

    monkeypatch.setattr("common.storage_errors.os.statvfs", free)
    with pytest.raises(StorageError, match=rf"^{tmp_path}/result: no space left on the device, which has 0.* of 7"):
        fill()
    assert not list(tmp_path.iterdir())


def test_an_earlier_folder_comes_back_if_the_new_one_cannot_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = a_folder(tmp_path / "result", "old")

    def fail(_temporary: Path, _final: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(targets, "commit_directory", fail)
    with pytest.raises(OSError, match="error"), new_folder(target, replaces=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    assert (target / "old").exists()
