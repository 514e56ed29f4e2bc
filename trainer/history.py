"""Reads `metrics.jsonl` back: all of it, with a look at whether it can be what a run has written, or up to where a run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.errors import CheckpointError

__all__ = ["METRICS", "events_until", "lines_until", "read_events"]

METRICS = "metrics.jsonl"
"""Where a run's numbers are in its directory."""
_OF_EVALUATIONS = ("eval", "sample", "scores")
_EXACT = {"loss": "loss_hex", "val_loss": "val_loss_hex"}


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run in their order: the training steps are 1, 2, 3, …, and each loss is the one that is kept exactly.

    A last line that was cut off while it was being written is left out.

    Raises:
        CheckpointError: the file is missing, or a line of it cannot be what a run has written; the message names it.
    """
    step = 0
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; restore it from a copy") from None
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith(b"\n"):
            return
        try:
            event = json.loads(line)
            step += event["event"] == "train"
            _check(event, step)
        except (ValueError, KeyError, TypeError) as error:
            reason = error.args[0] if type(error) is ValueError else f"not an event ({error})"
            raise CheckpointError(f"{path}, line {number}: {reason}; the file was changed, restore it from a copy") from None
        yield event


def lines_until(path: Path, step: int, *, evaluated: bool = True) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics file up to a step, without their ends, each with its event; what a kill cut off is passed over.

    Without `evaluated`, what an evaluation of that very step has found is left out: the checkpoint does not know of it, so the run
    evaluates again.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # the line that was being written when the run was killed
            continue
        unknown = not evaluated and event["step"] == step and event["event"] in _OF_EVALUATIONS
        if event["step"] <= step and not unknown:
            yield line, event


def events_until(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """The events of `lines_until`."""
    return (event for _, event in lines_until(path, step))


def _check(event: dict[str, Any], last_step: int) -> None:
    """Raises ValueError for an event that does not fit."""
    if event["event"] in ("train", "eval") and event["step"] != last_step:
        raise ValueError(f"step {event['step']}, where step {last_step} is expected")
    for name, exact in _EXACT.items():
        if name in event and float.fromhex(event[exact]).hex() != float(event[name]).hex():
            raise ValueError(f"{name} is {event[name]}, but {exact} says {float.fromhex(event[exact])}")
