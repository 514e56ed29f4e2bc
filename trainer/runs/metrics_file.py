"""Reads `metrics.jsonl` back: the whole file with checks, or the part that a checkpoint covers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import CheckpointError
from common.files import parse_json
from common.untrusted import read_lines
from trainer.runs.events import AlertEvent, EndEvent, EvalEvent, Event, TrainEvent, check_exact_losses, parse_event


@dataclass(frozen=True)
class CutOff:
    """The events that a state covers from which a run resumes. Later events are removed, because the run writes them again."""

    step: int
    evaluated: bool = True  # whether the state includes the evaluation of that step
    rollbacks: int | None = None  # rollbacks of the run so far; None keeps all that were written


class Selection:
    def __init__(self, cut_off: CutOff) -> None:
        self._cut_off = cut_off
        self._rollbacks = 0
        self.dropped_here = False  # whether an event of the state's own step was dropped

    def keeps(self, step: int, *, of_evaluation: bool = False, rule: str = "", action: str = "") -> bool:
        if step > self._cut_off.step:
            return False
        repeated = of_evaluation and step == self._cut_off.step and not self._cut_off.evaluated
        if action == "rollback":
            self._rollbacks += 1
            repeated = self._cut_off.rollbacks is not None and self._rollbacks > self._cut_off.rollbacks
        kept = rule != "failed" and not repeated
        self.dropped_here |= step == self._cut_off.step and not kept
        return kept


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events in their order. Steps must be 1, 2, 3, …, and each loss must equal its exact form. Skip a torn last line."""
    last_step = 0
    try:
        for number, line in enumerate(read_lines(path, path.parent), 1):
            if not line.endswith(b"\n"):
                return
            facts, event = _parsed(path, number, line)
            last_step += isinstance(event, TrainEvent)
            try:
                if isinstance(event, TrainEvent | EvalEvent) and event.step != last_step:
                    raise ValueError(f"step {event.step}, but step {last_step} was expected")
                check_exact_losses(facts)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise _changed(path, number, error) from None
            yield event
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; restore it from a copy") from None


def lines_until(path: Path, cut_off: CutOff) -> Iterator[tuple[bytes, Event]]:
    """Yield each line that the state covers, without its line end, and its event. A line that a kill cut off is skipped."""
    selection = Selection(cut_off)
    try:
        for number, ended in enumerate(read_lines(path, path.parent), 1):
            line = ended.rstrip(b"\r\n")
            try:
                _, event = _parsed(path, number, line)
            except _TornLineError:
                continue
            rule, action = (event.rule, event.action) if isinstance(event, AlertEvent) else ("", "")
            if isinstance(event, EndEvent):
                continue
            if selection.keeps(event.step, of_evaluation=event.is_of_evaluation, rule=rule, action=action):
                yield line, event
    except FileNotFoundError:
        return


def events_until(path: Path, cut_off: CutOff) -> Iterator[Event]:
    return (event for _, event in lines_until(path, cut_off))


class _TornLineError(CheckpointError):
    """A line is no JSON."""


def _parsed(path: Path, number: int, line: bytes) -> tuple[Any, Event]:
    try:
        facts = parse_json(line)
    except ValueError as error:
        raise _TornLineError(str(_changed(path, number, error))) from None
    try:
        return facts, parse_event(facts)
    except (ValueError, KeyError, TypeError) as error:
        raise _changed(path, number, error) from None


def _changed(path: Path, number: int, error: Exception) -> CheckpointError:
    reason = error.args[0] if type(error) is ValueError else f"not an event ({error})"
    return CheckpointError(f"{path}, line {number}: {reason}; the file was changed: restore it from a copy")
