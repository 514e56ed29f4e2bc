"""The thread that owns the model: texts wait in a queue of limited length, and some of them are written by turns.

Each text is computed alone, one token at a time, so its bits do not depend on what else is written. A text whose reader has gone
ends before its next token, and its memory is free then.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from common.errors import ProjectError
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Piece, TextModel
from trainer.serve.forms import RequestError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    num_prompt_tokens: int


Event = Started | Piece | RequestError
"""A text has `Started`, and its pieces up to one with a reason; or an error in place of any of them."""


@dataclass(eq=False)
class Job:
    """One text to write. `prepare` returns the tokens before it, and may raise a RequestError; both functions run in the thread."""

    prepare: Callable[[], tuple[Sequence[int], Sampling]]
    row: int  # decides the noise
    deliver: Callable[[Event], object]
    is_cancelled: bool = False


class Full(Exception):  # noqa: N818 - an outcome and not a fault
    pass


class Worker:
    """`num_turns`: texts that are written by turns. `num_waiting`: texts that may wait for a turn."""

    def __init__(self, model: TextModel, num_turns: int, num_waiting: int) -> None:
        self._model, self._num_turns, self.capacity = model, num_turns, num_turns + num_waiting
        self._waiting: deque[Job] = deque()
        self._active: deque[tuple[Job, Generator[Piece, None, None]]] = deque()
        self._num_active = 0  # with the one that is begun
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._thread.start()

    @property
    def num_jobs(self) -> int:
        with self._changed:
            return len(self._waiting) + self._num_active

    def submit(self, jobs: Sequence[Job]) -> None:
        """Raises Full if not all of them have a place."""
        with self._changed:
            if len(self._waiting) + self._num_active + len(jobs) > self.capacity:
                raise Full
            self._waiting.extend(jobs)
            self._changed.notify()

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End texts before their next token. Those that wait lose their place at once."""
        with self._changed:
            for job in jobs:
                job.is_cancelled = True
            self._waiting = deque(job for job in self._waiting if not job.is_cancelled)

    def close(self) -> None:
        """End all texts, and wait for the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while not self._is_closing:
            if not self._take() and self._active:
                self._write_token()
        for _, pieces in self._active:
            pieces.close()

    def _take(self) -> bool:
        """Begin the next text; wait for one if there is nothing else to do. Return whether there was one."""
        # The local variables of `_begin` and `_write_token` hold the cache of a text. They are gone before this wait.
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._active or self._is_closing)
            if not self._waiting or self._num_active == self._num_turns:
                return False
            job = self._waiting.popleft()
            self._num_active += 1
        self._begin(job)
        return True

    def _begin(self, job: Job) -> None:
        try:
            tokens, sampling = job.prepare()
            pieces = self._model.pieces_after(tokens, sampling, job.row)
        except Exception as error:  # one text must not end the thread
            self._fail(job, error)
        else:
            job.deliver(Started(len(tokens)))
            self._active.append((job, pieces))

    def _write_token(self) -> None:
        job, pieces = self._active.popleft()
        if job.is_cancelled:
            pieces.close()
            self._end()
            return
        try:
            piece = next(pieces)
        except Exception as error:  # one text must not end the thread
            self._fail(job, error)
            return
        if piece.finish_reason is None:
            self._active.append((job, pieces))
        else:
            pieces.close()
            self._end()
        job.deliver(piece)

    def _fail(self, job: Job, error: Exception) -> None:
        self._end()
        job.deliver(_as_answer(error))

    def _end(self) -> None:
        with self._changed:
            self._num_active -= 1


def _as_answer(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return RequestError(error.message, error.status, error.param, error.code)  # without the frames, which hold the cache
    if isinstance(error, ProjectError):
        return RequestError(str(error), 500)
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        torch.cuda.empty_cache()
        return RequestError(
            "the memory ran out while the text was written; send a shorter prompt, or start with fewer --turns", 503
        )
    _log.error("a text could not be written", exc_info=error)
    return RequestError("the text could not be written; the log of the server says why", 500)
