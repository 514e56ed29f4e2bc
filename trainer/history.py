"""Reads `metrics.jsonl` back: all of it, with a look at whether it can be what a run has written, or up to where a run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from data_pipeline.errors import CheckpointError
from data_pipeline.files import parse_json
from trainer.run_inputs import MAX_COUNT, is_number, read_lines

__all__ = ["METRICS", "events_until", "lines_until", "read_events"]

METRICS = "metrics.jsonl"
"""Where a run's numbers are in its directory."""
_OF_EVALUATIONS = ("eval", "sample", "scores")
_NUMBERS = {"train": ("loss", "grad_norm"), "eval": ("val_loss",)}
_EXACT = {"loss": "loss_hex", "val_loss": "val_loss_hex"}


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


def lines_until(path: Path, step: int, *, evaluated: bool = True) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file up to a step, without their ends, each with its event; what a kill cut off is passed over.

    Without `evaluated`, what an evaluation of that very step has found is left out: the checkpoint does not know of it, so the run
    evaluates again.

    Raises:
        CheckpointError: a line cannot be what a run has written; the message names it.
    """
    try:
        for number, ended in enumerate(read_lines(path, path.parent), 1):
            line = ended.rstrip(b"\r\n")
            try:
                event = _event(path, number, line)
            except _TornLineError:  # it was being written when the run was killed
                continue
            unknown = not evaluated and event["step"] == step and event["event"] in _OF_EVALUATIONS
            if event["step"] <= step and not unknown:
                yield line, event
    except FileNotFoundError:
        return


def events_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The events of `lines_until`."""
    return (event for _, event in lines_until(path, step))


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
