"""Data that a process reads is not replaced, and the error message names the reader."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from common.errors import ConfigError, PreparedDataError
from data_pipeline.dataset.locks import READERS, reading, replacing

_READ = """
import sys
from pathlib import Path
from data_pipeline.dataset.locks import reading
with reading(Path(sys.argv[1]), sys.argv[2]):
    print("reading", flush=True)
    sys.stdin.read()
"""

Reader = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Start a process that reads the data in `tmp_path` until its input ends."""
    with ExitStack() as stack:

        def start(name: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", _READ, str(tmp_path), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            return process

        yield start


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("")
    assert process.returncode == 0


def refusal(directory: Path) -> str:
    with pytest.raises(ConfigError) as refused, replacing(directory):
        pass
    return str(refused.value)


def test_every_reader_is_named_until_it_ends(tmp_path: Path, reader: Reader) -> None:
    first, second = reader("run first"), reader("run second")
    told = refusal(tmp_path)
    assert "in use by " in told
    assert f"run first, process {first.pid} on " in told
    assert f"run second, process {second.pid} on " in told
    end(first)
    assert "run first" not in refusal(tmp_path)
    end(second)
    with replacing(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_a_killed_reader_holds_nothing_and_its_name_goes(tmp_path: Path, reader: Reader) -> None:
    killed, alive = reader("run killed"), reader("run alive")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert "run killed" not in refusal(tmp_path)
    end(alive)
    with replacing(tmp_path):
        assert not (tmp_path / READERS).exists()


def test_a_run_that_was_killed_takes_its_name_again(tmp_path: Path, reader: Reader) -> None:
    for _ in range(2):
        again = reader("run again")
        assert f"run again, process {again.pid} on " in refusal(tmp_path)
        again.kill()
        again.wait()
    assert len(list((tmp_path / READERS).iterdir())) == 1


def test_a_reader_is_refused_while_the_data_is_replaced(tmp_path: Path) -> None:
    with replacing(tmp_path), pytest.raises(PreparedDataError, match="is replacing this data now"), reading(tmp_path):
        pass
    with reading(tmp_path):
        pass


def test_readers_do_not_hinder_each_other(tmp_path: Path) -> None:
    with reading(tmp_path, "run a"), reading(tmp_path, "run a"), reading(tmp_path):
        assert refusal(tmp_path).count("run a, ") == 1


def test_a_reader_without_a_name_is_not_overlooked(tmp_path: Path) -> None:
    with reading(tmp_path):
        assert "in use by another process (its name is unknown)" in refusal(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_held_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("data_pipeline.dataset.locks.own_folder", refuse)
    with reading(tmp_path, "run a"):
        assert "in use by another process" in refusal(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_nothing_is_made_where_there_is_no_folder(tmp_path: Path) -> None:
    with reading(tmp_path / "missing", "run a"), replacing(tmp_path / "missing"):
        assert list(tmp_path.iterdir()) == []


@contextmanager
def linked_folder(directory: Path, elsewhere: Path) -> Iterator[None]:
    (directory / READERS).symlink_to(elsewhere, target_is_directory=True)
    yield
    assert list(elsewhere.iterdir()) == [elsewhere / "file"]


@contextmanager
def linked_names(directory: Path, elsewhere: Path) -> Iterator[None]:
    with reading(directory, "run a"):
        [name] = [path.name for path in (directory / READERS).iterdir()]
    (directory / READERS).mkdir()
    (directory / READERS / name).symlink_to(elsewhere / "file")
    yield


@contextmanager
def second_name(directory: Path, elsewhere: Path) -> Iterator[None]:
    with reading(directory, "run a"):
        [name] = [path.name for path in (directory / READERS).iterdir()]
    (directory / READERS).mkdir()
    os.link(elsewhere / "file", directory / READERS / name)
    yield


@contextmanager
def pipe(directory: Path, elsewhere: Path) -> Iterator[None]:
    (directory / READERS).mkdir()
    os.mkfifo(directory / READERS / "0123456789abcdef")
    yield


@pytest.mark.parametrize("trap", [linked_folder, linked_names, second_name, pipe])
def test_what_a_stranger_has_put_in_the_place_of_names_is_neither_followed_nor_waited_for(
    tmp_path: Path, trap: Callable[[Path, Path], AbstractContextManager[None]]
) -> None:
    directory, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("precious")
    with trap(directory, elsewhere):
        with reading(directory, "run a"):
            assert "in use by " in refusal(directory)
        with replacing(directory):
            pass
        assert (elsewhere / "file").read_text() == "precious"
