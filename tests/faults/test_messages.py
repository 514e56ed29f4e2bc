"""Fault 63: an error of the operating system in any call becomes one line with a path, a reason and what to do."""

from __future__ import annotations

import errno
import io
import logging
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from common.command_line import run_command
from common.errors import ExitCode
from data_pipeline.__main__ import main
from tests.support.claims import counted, noted
from tests.support.corpora import sentences, write_texts
from tests.support.faults import seeds
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, arguments, tiny_config

CODES = (
    *(errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ESTALE),
)
CALLS = ("open", "mkdir", "rename", "link", "replace", "unlink", "scandir", "listdir")
WITHOUT_PATH = ("fsync", "write")
CODES_WITHOUT_PATH = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_EXPECTED = re.compile(r"^error: .*/.*; .+$")


class Failing:
    """Lets the `number`-th call of the operating system for a file below `folder` fail. With None, only counts the calls."""

    def __init__(self, folder: Path, number: int | None, draw: random.Random) -> None:
        self.folder, self.number, self.draw = str(folder), number, draw
        self.seen = 0
        self.failed = ""

    def __call__(self, name: str, path: str | None) -> None:
        if path is not None and not path.startswith(self.folder):
            return
        here, self.seen = self.seen, self.seen + 1
        if here == self.number:
            self.failed = name
            code = self.draw.choice(CODES_WITHOUT_PATH if path is None else CODES)
            raise OSError(code, os.strerror(code), *(() if path is None else (path,)))


@contextmanager
def failing(hook: Failing) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, with_path(name, getattr(os, name), hook))
        patch.setattr(io, "open", with_path("open", io.open, hook))
        for name in WITHOUT_PATH:
            patch.setattr(os, name, without_path(name, getattr(os, name), hook))
        yield


def with_path(name: str, call: Callable[..., Any], hook: Failing) -> Callable[..., Any]:
    def hooked(path: Any = ".", *others: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and not options.get("dir_fd"):
            hook(name, os.fspath(path))
        return call(path, *others, **options)

    return hooked


def without_path(name: str, call: Callable[..., Any], hook: Failing) -> Callable[..., Any]:
    def hooked(descriptor: int, *others: Any) -> Any:
        if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(hook.folder):
            hook(name, None)
        return call(descriptor, *others)

    return hooked


def prepared_with(hook: Failing, text: Path, output: Path) -> tuple[int, str]:
    """Return the exit code of a preparation, and its output without warnings and progress."""
    told = io.StringIO()
    words = ["prepare", "--sources", str(text), "--output", str(output), "--workers", "1", "--tokenizer.kind", "byte"]
    with redirect_stderr(told), failing(hook):
        code = run_command(main, [*words, "--row_length", "64"])
    logging.getLogger("data_pipeline").handlers.clear()
    return code, "".join(line for line in told.getvalue().splitlines(True) if not line.startswith(("WARNING", "INFO", "[")))


@pytest.mark.claim("63", "each call of the operating system for a file of a preparation fails, with any of 11 errors", unit="runs")
def test_63_an_error_of_any_call_of_a_preparation_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    text = write_texts(tmp_path / "text.jsonl", sentences(0, 30))
    output = tmp_path / "out"
    counter = Failing(output, None, random.Random())
    assert prepared_with(counter, text, output)[0] == ExitCode.DONE
    failed: Counter[str] = Counter()
    for seed in seeds(10, 600):
        shutil.rmtree(output)
        draw = random.Random(seed)
        hook = Failing(output, draw.randrange(counter.seen), draw)
        code, told = prepared_with(hook, text, output)
        failed[hook.failed] += 1
        if code == ExitCode.DONE:
            counted("errors that prevented nothing", 1)
            continue
        assert code in (ExitCode.CONFIG, ExitCode.DATA, ExitCode.STORAGE), told
        assert _EXPECTED.match(told), told
        assert told.count("\n") == 1, told
        assert "Errno" not in told
    assert failed.keys() - {""}
    noted(f"at {counter.seen} calls: {', '.join(f'{count} {name}' for name, count in sorted(failed.items()))}")


@pytest.mark.claim("63", "a file of the run cannot grow while two ranks train", unit="runs")
def test_63_of_two_ranks_only_the_one_that_cannot_write_speaks(tmp_path: Path) -> None:
    for seed in seeds(1, 20):
        data = write_prepared(tmp_path / f"data-{seed}")
        config = tiny_config(
            *(data, tmp_path / f"run-{seed}"),
            limits={"steps": 100_000},
            eval={"every_steps": 100_000},
            checkpoint={"every_steps": 100_000},
            log={"report": False, "hardware_every_s": 0, "every_steps": 1000},
        )
        most_bytes = random.Random(seed).randrange(20_000, 60_000)
        done = subprocess.run(
            ["prlimit", f"--fsize={most_bytes}", ROOT / "entrypoints/train", *arguments(config)],
            # Without GIT_DIR, a git process that is killed at the time limit would leave a lock in the repository of this checkout.
            env=os.environ | {"PYTHON": sys.executable, "CPU_RANKS": "2", "OMP_NUM_THREADS": "1", "GIT_DIR": os.devnull},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == ExitCode.STORAGE, done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith(f"error: {config.run}")
        assert "larger than the file system or `ulimit -f` allows; use another" in lines[0]
