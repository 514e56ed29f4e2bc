from __future__ import annotations

import gc
import queue
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from tests.support.served import small_model
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Piece, TextModel
from trainer.serve import worker as worker_module
from trainer.serve.forms import RequestError
from trainer.serve.worker import Event, Full, Job, Started, Worker

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = small_model()
LONG = Sampling(100_000, seed=1)


class Reader:
    """A job, and what it delivers."""

    def __init__(self, prompt: str = "once", sampling: Sampling = LONG, row: int = 0) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.job = Job(lambda: (MODEL.prompt_tokens(prompt), sampling), row, self.events.put)

    def next(self) -> Event:
        return self.events.get(timeout=60)

    def text(self) -> str:
        found = ""
        assert isinstance(self.next(), Started)
        while True:
            piece = self.next()
            assert isinstance(piece, Piece)
            found += piece.text
            if piece.finish_reason:
                return found


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(MODEL, num_turns=3, num_waiting=2)
    yield made
    made.close()


def wait_until_idle(worker: Worker) -> None:
    while worker.num_jobs:
        pass


def test_a_text_is_that_of_the_model_alone_whatever_else_is_written(worker: Worker) -> None:
    samplings = [Sampling(20 + 7 * number, seed=number, temperature=1.1) for number in range(5)]
    prompts = ["once", "a", "the cat sat", "once", "on a mat and the dog " * 2]
    alone = [
        MODEL.complete([prompt], sampling, first_row=number)[0].text
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    readers = [Reader(prompt, sampling, number) for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))]
    worker.submit([reader.job for reader in readers])
    assert [reader.text() for reader in readers] == alone
    assert len(set(alone)) == 5


def test_texts_take_turns(worker: Worker) -> None:
    long, short = Reader(), Reader(sampling=Sampling(5))
    worker.submit([long.job, short.job])
    assert len(short.text()) <= 5
    assert worker.num_jobs == 1
    worker.cancel([long.job])
    wait_until_idle(worker)


def test_a_full_queue_takes_nothing_and_a_cancelled_text_makes_room(worker: Worker) -> None:
    readers = [Reader() for _ in range(5)]
    worker.submit([reader.job for reader in readers])
    with pytest.raises(Full):
        worker.submit([Reader().job])
    assert worker.num_jobs == 5
    worker.cancel([reader.job for reader in readers])
    wait_until_idle(worker)
    last = Reader(sampling=Sampling(3))
    worker.submit([last.job])
    last.text()


def test_a_text_that_waits_and_is_cancelled_makes_room_at_once(worker: Worker) -> None:
    readers = [Reader() for _ in range(5)]
    worker.submit([reader.job for reader in readers])
    for reader in readers[:3]:
        assert isinstance(reader.next(), Started)
    worker.cancel([readers[4].job])
    assert worker.num_jobs == 4
    worker.submit([Reader().job])


def test_a_text_that_waits_and_is_cancelled_is_never_begun(worker: Worker) -> None:
    readers = [Reader() for _ in range(4)]
    worker.submit([reader.job for reader in readers])
    for reader in readers[:3]:
        assert isinstance(reader.next(), Started)
    worker.cancel([reader.job for reader in readers])
    wait_until_idle(worker)
    assert readers[3].events.empty()


@pytest.mark.parametrize("ends", ["cancelled", "finished", "failed"])
def test_the_memory_of_a_text_is_free_when_it_ends(worker: Worker, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    made: list[weakref.ref[Any]] = []
    keep_of = TextModel._continued

    def watched(self: TextModel, *arguments: Any) -> Iterator[None]:
        class Cache:
            pass

        cache = Cache()
        made.append(weakref.ref(cache))
        for number, _ in enumerate(keep_of(self, *arguments)):
            yield
            if number == 3 and ends == "failed":
                raise ValueError(f"broken with {cache}")

    monkeypatch.setattr(TextModel, "_continued", watched)
    monkeypatch.setattr(worker_module, "_log", type("Log", (), {"error": lambda *_, **__: None}))
    reader = Reader(sampling=Sampling(6 if ends == "finished" else 100_000))
    worker.submit([reader.job])
    assert isinstance(reader.next(), Started)
    assert isinstance(reader.next(), Piece)
    assert made[0]() is not None
    if ends == "cancelled":
        worker.cancel([reader.job])
    wait_until_idle(worker)
    last = Reader(sampling=Sampling(1))
    worker.submit([last.job])  # once it is written, the thread has left the functions that the first text needed
    last.text()
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RequestError("too long", 400, "prompt", "context_length_exceeded"), 400, "too long"),
        (CheckpointError("the logits are not finite"), 500, "the logits are not finite"),
        (torch.OutOfMemoryError("16 GiB"), 503, "the memory ran out"),
        (MemoryError(), 503, "the memory ran out"),
        (KeyError("x"), 500, "the log of the server says why"),
    ],
)
def test_an_error_ends_its_text_and_not_the_others(
    worker: Worker, error: Exception, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Any:
        raise error

    reader, other = Reader(), Reader(sampling=Sampling(9))
    reader.job.prepare = broken
    worker.submit([other.job, reader.job])
    found = reader.next()
    assert isinstance(found, RequestError)
    assert (found.status, found.__traceback__) == (status, None)
    assert message in found.message
    other.text()
    wait_until_idle(worker)
    assert bool(caplog.records) == isinstance(error, KeyError)


def test_a_worker_that_closes_ends_what_it_writes_and_what_waits() -> None:
    made = Worker(MODEL, num_turns=1, num_waiting=3)
    readers = [Reader() for _ in range(3)]
    made.submit([reader.job for reader in readers])
    assert isinstance(readers[0].next(), Started)
    made.close()
    assert readers[1].events.empty()
    assert not made._thread.is_alive()
