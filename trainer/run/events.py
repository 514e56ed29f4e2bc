"""Reads `metrics.jsonl` back: all of it, with a look at whether it can be what a run has written, or up to where a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from common.errors import CheckpointError
from common.files import parse_json
from common.untrusted import MAX_COUNT, is_number, read_lines

__all__ = ["METRICS", "Known", "Selection", "events_until", "lines_until", "read_events"]

METRICS = "metrics.jsonl"
"""Where a run's numbers are in its directory."""
_OF_EVALUATIONS = ("eval", "sample", "scores")
_RULES_OF_EVALUATIONS = ("plateau", "overfitting")
_NUMBERS = {"train": ("loss", "grad_norm"), "eval": ("val_loss",)}
_EXACT = {"loss": "loss_hex", "val_loss": "val_loss_hex"}


@dataclass(frozen=True)
class Known:
    """What the state that a run goes on from knows. All that was told beyond it will be told again, so it has to go."""

    step: int
    evaluated: bool = True
    """Whether that step has been evaluated."""
    rollbacks: int | None = None
    """How often the run had been rolled back; None: as often as was told."""


class Selection:
    """Tells for one event after the other, in their order, whether the state that a run goes on from knows of it."""

    def __init__(self, known: Known) -> None:
        self._known = known
        self._rollbacks = 0
        self.dropped_here = False
        """Whether an event of the known step itself was unknown."""

    def keeps(self, step: int, kind: str, rule: str = "", action: str = "") -> bool:
        """Whether to keep an event: its step, its name, and of an alert the rule and the action. The run's end is never kept."""
        if step > self._known.step:
            return False
        kept = kind != "end" and rule != "failed" and not self._repeated(step, kind, rule, action)
        self.dropped_here |= step == self._known.step and kind != "end" and not kept
        return kept

    def _repeated(self, step: int, kind: str, rule: str, action: str) -> bool:
        if kind == "alert" and action == "rollback":
            self._rollbacks += 1
            return self._known.rollbacks is not None and self._rollbacks > self._known.rollbacks
        of_evaluation = kind in _OF_EVALUATIONS or (kind == "alert" and rule in _RULES_OF_EVALUATIONS)
        return of_evaluation and step == self._known.step and not self._known.evaluated


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in their order: the training steps are 1, 2, 3, …, and each loss is the one that is kept exactly.

    A last line that was cut off while it was being written is left out.

    Raises:
        CheckpointError: the file is missing, or a line of it cannot be what a run has written; the message names it.
    """
    step = 0
    try:
        for number, line in enumerate(read_lines(path, path.parent), 1):
            if not line.endswith(b"\n"):
                return
            event = _event(path, number, line)
            step += event["event"] == "train"
            try:
                _check(event, step)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise _changed(path, number, error) from None
            yield event
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; restore it from a copy") from None


def lines_until(path: Path, known: Known) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file that are known, without their ends, each with its event; what a kill cut off is passed over.

    Raises:
        CheckpointError: a line cannot be what a run has written; the message names it.
    """
    selection = Selection(known)
    try:
        for number, ended in enumerate(read_lines(path, path.parent), 1):
            line = ended.rstrip(b"\r\n")
            try:
                event = _event(path, number, line)
            except _TornLineError:  # it was being written when the run was killed
                continue
            if selection.keeps(event["step"], event["event"], event.get("rule", ""), str(event.get("action", ""))):
                yield line, event
    except FileNotFoundError:
        return


def events_until(path: Path, known: Known) -> Iterator[dict[str, Any]]:
    """The events of `lines_until`."""
    return (event for _, event in lines_until(path, known))


class _TornLineError(CheckpointError):
    """A line is no JSON."""


def _event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The event in a line, with the fields that all readers rest on."""
    try:
        event = parse_json(line)
    except ValueError as error:
        raise _TornLineError(str(_changed(path, number, error))) from None
    try:
        _check_fields(event)
    except (ValueError, KeyError, TypeError) as error:
        raise _changed(path, number, error) from None
    return cast(dict[str, Any], event)


def _changed(path: Path, number: int, error: Exception) -> CheckpointError:
    reason = error.args[0] if type(error) is ValueError else f"not an event ({error})"
    return CheckpointError(f"{path}, line {number}: {reason}; the file was changed, restore it from a copy")


def _check_fields(event: Any) -> None:
    """Raises for fields of another type or range than a run writes."""
    if not isinstance(event, dict) or not isinstance(event["event"], str):
        raise TypeError("no table with the name of an event")
    for name in ("step", "tokens"):
        count = event["step"] if name == "step" else event.get(name, 0)
        if type(count) is not int or not 0 <= count <= MAX_COUNT:
            raise ValueError(f"{name} is {str(count)[:80]!r}, and a whole number from 0 on is expected")
    for name in _NUMBERS.get(event["event"], ()):
        if not is_number(event[name]):
            raise ValueError(f"{name} is {str(event[name])[:80]!r}, and a number is expected")
    if not isinstance(event.get("rule", ""), str):
        raise ValueError(f"rule is {str(event['rule'])[:80]!r}, and a name is expected")


def _check(event: dict[str, Any], last_step: int) -> None:
    """Raises ValueError for an event that does not fit."""
    if event["event"] in ("train", "eval") and event["step"] != last_step:
        raise ValueError(f"step {event['step']}, where step {last_step} is expected")
    for name, exact in _EXACT.items():
        if name in event and float.fromhex(event[exact]).hex() != float(event[name]).hex():
            raise ValueError(f"{name} is {event[name]}, but {exact} says {float.fromhex(event[exact])}")
