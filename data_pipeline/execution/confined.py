"""Runs a Python program in a separate process, for parsers in C, C++ or Rust that may crash or hang on hostile input.

The program limits its memory and time itself. It shares two pipes with this process, and gets no variables with credentials.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self, TypeVar

from common.child_process import child_environment, inherited_limit
from common.errors import WorkerError

AnswerT = TypeVar("AnswerT")
_MAX_READ_BYTES = 1 << 20
_QUIET_ALLOCATION = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Other settings of the allocators reserve gigabytes of address space, which the memory limit would count."""


class ProgramEndedError(Exception):
    """The program ended, or was silent for too long, before its answer was complete."""

    def __init__(self, how: str, signal_number: int = 0) -> None:
        super().__init__(how)
        self.signal_number = signal_number  # 0 if no signal ended the program


def refuse_lower_limits(memory_bytes: int, seconds: int = 0) -> None:
    """WorkerError if inherited limits allow a program less than it may use: other limits of a shell must not change the data."""
    if limit := inherited_limit(memory_bytes, seconds):
        time = f" and {seconds} s of processor time" if seconds else ""
        raise WorkerError(
            f"a program that parses input has failed under an existing limit of this process, {limit}; it may need "
            f"{memory_bytes >> 20} MiB more than Python{time}; raise the limit, and run the same command again"
        )


class ConfinedProgram:
    """A running program. It may be silent for `silence_s` seconds of wall time while an answer is expected."""

    def __init__(self, script: Path, silence_s: float) -> None:
        self._silence_s = silence_s
        # A new program, not a fork of this process, which may have threads, and memory that the program must not see.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],  # without the folder of the script in its module path
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=child_environment() | _QUIET_ALLOCATION,
            start_new_session=True,  # Ctrl-C in a terminal signals the whole group, but this process ends the program
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()

    def close(self) -> None:
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass

    def read(self, size: int) -> bytes:
        """ProgramEndedError: it ends or is silent for too long."""
        pieces = []
        while size:
            if not select.select([self._out], [], [], self._silence_s)[0]:
                raise ProgramEndedError(f"was silent for {self._silence_s:.0f} s")
            if not (piece := os.read(self._out, min(size, _MAX_READ_BYTES))):
                status = self._process.wait()
                if status < 0:
                    raise ProgramEndedError(f"was ended by {signal.Signals(-status).name}", -status)
                raise ProgramEndedError(f"ended with status {status}")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def write(self, data: bytes) -> None:
        """Send `data` to the program. If it has ended, nothing happens: its earlier output can still be read."""
        view = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(self._in, view) :]


class ProgramOnDemand:
    """Owner of a program that starts when it is needed, and again after `close`. Each gets `setup` before its first request."""

    def __init__(self, script: Path, silence_s: float, setup: bytes = b"") -> None:
        self._script, self._silence_s, self._setup = script, silence_s, setup
        self._program: ConfinedProgram | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self, question: Callable[[ConfinedProgram], AnswerT | None], what: str, ended_by_question: Collection[int]
    ) -> AnswerT | None:
        """None: no answer, or it ends the program by one of these signals (0: none). If a used program fails, a fresh one tries."""
        while True:
            was_fresh = self._program is None
            try:
                answer = question(self.running())
            except ProgramEndedError as error:
                if error.signal_number not in ended_by_question:
                    raise WorkerError(
                        f"the process that {what} {error}; if the machine lacks memory, use fewer --workers; "
                        "finished work is kept: run the same command again"
                    ) from None
                answer = None
            if answer is not None:
                return answer
            self.close()
            if was_fresh:
                return None

    def running(self) -> ConfinedProgram:
        if self._program is None:
            self._program = ConfinedProgram(self._script, self._silence_s)
            self._program.write(self._setup)
        return self._program

    def close(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.close()
