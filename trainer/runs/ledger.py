"""The ledger of a run, `ledger/steps.jsonl`: the rows of every step, one line for each step, as a chain of digests.

    {"event":"order","step":0,"seed":1337,"data":"sha256:…","rows":61,"mixture":{},"chain":"…"}
    {"step":1,"start":0,"count":8,"epoch":0,"targets":214,"digest":"…","applied":true,"chain":"…"}

The order of rows is a pure function of the last `order` event and a position, so the line of a step holds the position and a digest
of the row numbers, not the rows. `chain` is the sha256 of the chain before it and of the rest of its line: a line that is changed,
missing, doubled or moved breaks the chain. The chain does not show a ledger that ends too early; so each checkpoint holds the head.

Lines are handed to the system with every step and forced to the device before each checkpoint. A resume removes the lines after the
checkpoint. So the ledger is always the history of the present state, even if the run was killed many times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from common.errors import CheckpointError
from common.files import parse_json, sync_directory
from common.untrusted import MAX_COUNT, Count, Finite, Schema, parsed, read_lines
from trainer.runs.layout import make_folder, open_own
from trainer.runs.state import LedgerHead

_MAX_BATCH_ROWS = 1 << 20  # the largest `batch.global_batch_size`
_CHAIN_CHARS = len(LedgerHead().chain)
_SEPARATOR = b',"chain":"'
_END = b'"}\n'


class LedgerStep(Schema, extra="forbid", frozen=True):
    head: LedgerHead = Field(LedgerHead(), exclude=True)  # the place after this line; not in the file
    step: Count
    start: Count  # position of its first row in the order
    count: Annotated[int, Field(ge=1, le=_MAX_BATCH_ROWS)]
    epoch: Count  # epoch of its first row
    targets: Count
    digest: str  # `digest_of_rows` of the row numbers, in order
    applied: bool  # False if the guard withheld the update


class LedgerEvent(Schema, frozen=True):
    """The line of an event between two steps. An event that has no class here keeps its values as extra fields."""

    head: LedgerHead = Field(LedgerHead(), exclude=True)
    event: str
    step: Count


class OrderEvent(LedgerEvent, frozen=True):
    seed: Annotated[int, Field(ge=0, lt=1 << 63)]
    data: str
    rows: Count
    mixture: dict[str, Annotated[Finite, Field(gt=0)]]


class SkipEvent(LedgerEvent, frozen=True):
    """`count` positions from `start` on are never used: a batch that would contain one of them begins after the last."""

    start: Count
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    reason: str = ""


class QuarantineEvent(LedgerEvent, frozen=True):
    shards: list[str]


class _MicroEvent(LedgerEvent, frozen=True):
    rows: Annotated[int, Field(ge=1, le=_MAX_BATCH_ROWS)]


class _CooldownEvent(LedgerEvent, frozen=True):
    end: Count


_EVENTS: Mapping[str, type[LedgerEvent]] = {
    "order": OrderEvent,
    "skip": SkipEvent,
    "quarantine": QuarantineEvent,
    "micro": _MicroEvent,
    "cooldown": _CooldownEvent,
}


class Ledger:
    """Only rank 0 has one. Raises CheckpointError if the file was changed before the head `resumed`.

    A new file in place of a missing one starts with the event `gap`.
    """

    def __init__(self, path: Path, resumed: LedgerHead | None) -> None:
        self.path = path
        self._head = LedgerHead()
        self._order: Mapping[str, Any] = {}
        make_folder(path.parent)
        missing = resumed is not None and not path.exists()
        self._file = os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND, run=path.parent), "ab")
        try:
            self.rewind(LedgerHead() if resumed is None or missing else resumed)
            sync_directory(path.parent)
            if missing and resumed is not None:
                self.event("gap", step=resumed.step)
        except BaseException:
            self._file.close()
            raise

    @property
    def head(self) -> LedgerHead:
        return self._head

    def order(self, *, step: int, seed: int, data: str, rows: int, mixture: Mapping[str, float]) -> None:
        """Write the order of the next steps, unless it is the order of the steps before."""
        order = {"seed": seed, "data": data, "rows": rows, "mixture": dict(mixture)}
        if order != self._order:
            self.event("order", step=step, **order)
            self._order = order

    def commit(self, *, step: int, start: int, rows: NDArray[np.int64], targets: int, applied: bool = True) -> None:
        """Write the line of a step; `start` is the position of its first row, `rows` are those of the whole global batch."""
        epoch = start // self._order["rows"]
        facts = {"step": step, "start": start, "count": len(rows), "epoch": epoch, "targets": targets}
        self._write(step, facts | {"digest": digest_of_rows(rows), "applied": applied})

    def event(self, kind: str, *, step: int, **facts: Any) -> None:
        self._write(step, {"event": kind, "step": step, **facts})

    def rewind(self, head: LedgerHead) -> None:
        """Remove all lines after `head`. Raises CheckpointError if a line before `head` was changed."""
        self._file.flush()
        self._order = {}
        found, num_bytes = LedgerHead(), 0
        if head.lines:
            for entry, end in _entries(self.path):
                if isinstance(entry, OrderEvent):
                    self._order = entry.model_dump(exclude={"event", "step"})
                if entry.head.lines == head.lines:
                    found, num_bytes = entry.head, end
                    break
        if found != head:
            raise CheckpointError(
                f"{self.path}: line {head.lines} is not the one that the checkpoint of step {head.step} names, so the history of "
                "this run was changed; restore the file from a copy, or move it away to resume with a history that begins there"
            )
        os.ftruncate(self._file.fileno(), num_bytes)
        self._head = head

    def sync(self) -> None:
        """Force all lines to the device. After an OSError it is unknown which lines are there."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, step: int, facts: Mapping[str, Any]) -> None:
        body = json.dumps(facts, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()[:-1]
        chain = _next_chain(self._head.chain, body)
        self._file.write(body + _SEPARATOR + chain.encode() + _END)
        self._file.flush()
        self._head = LedgerHead(step, self._head.lines + 1, chain)


def digest_of_rows(rows: NDArray[np.int64]) -> str:
    return hashlib.blake2b(rows.astype("<i8", copy=False).tobytes(), digest_size=16).hexdigest()


def read_ledger(path: Path) -> Iterator[LedgerStep | LedgerEvent]:
    """Yield the lines, each after a check of its chain. Skip a torn last line. CheckpointError names a line that was changed."""
    for entry, _ in _entries(path):
        yield entry


def _entries(path: Path) -> Iterator[tuple[LedgerStep | LedgerEvent, int]]:
    head, end = LedgerHead(), 0
    try:
        for line in read_lines(path, path.parent.parent):
            if not line.endswith(b"\n") and line[:1] == b"{":
                _, separator, chain = line.rpartition(_SEPARATOR)
                if not separator or len(chain) < _CHAIN_CHARS + len(_END):  # the beginning of a line that a kill cut off
                    return
            try:
                entry = _parse(line, head)
            except ValueError as error:
                raise CheckpointError(
                    f"{path}, line {head.lines + 1}: {error}; the file was changed: restore it from a copy"
                ) from None
            if entry is None:
                raise CheckpointError(
                    f"{path}, line {head.lines + 1}: it lacks the digest of the lines before it, so a line was changed, "
                    "removed or moved; restore the file from a copy"
                )
            head, end = entry.head, end + len(line)
            yield entry, end
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing, so nothing says what this run was trained on; restore it from a copy") from None


def _parse(line: bytes, before: LedgerHead) -> LedgerStep | LedgerEvent | None:
    """Return a line; None if its chain does not follow from `before`. Raises ValueError if no run writes such a line."""
    body = line[: -len(_SEPARATOR) - _CHAIN_CHARS - len(_END)]
    chain = _next_chain(before.chain, body)
    if line != body + _SEPARATOR + chain.encode() + _END:
        return None
    facts = parse_json(body + b"}")
    kind: type[LedgerStep | LedgerEvent] = LedgerStep
    if isinstance(facts, dict):
        facts["head"] = LedgerHead(facts.get("step", 0), before.lines + 1, chain)
        if "event" in facts:
            kind = _EVENTS.get(str(facts["event"]), LedgerEvent)
    return parsed(kind, facts)


def _next_chain(chain: str, body: bytes) -> str:
    return hashlib.sha256(chain.encode() + body).hexdigest()
