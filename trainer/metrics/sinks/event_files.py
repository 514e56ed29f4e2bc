"""Removes records from TensorBoard's event files that the state does not cover from which a run resumes.

TensorBoard's server hides all points from the step of a `SessionLog` START on. Its `EventAccumulator` does not hide texts, and no
reader can hide a part of a step. So the points are removed from the files, as lines are removed from `metrics.jsonl`.

A file is a sequence of records: length (8 bytes, little-endian), checksum (4), a serialised `Event`, checksum (4).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event

from common.errors import CheckpointError
from common.files import UnusableFileError, open_input, write_atomic
from trainer.runs.events import EVENTS, AlertEvent
from trainer.runs.metric import metrics_of
from trainer.runs.metrics_file import CutOff, Selection
from trainer.runs.rules import RULES

_HEAD_BYTES, _TAIL_BYTES = 12, 4
_OF_EACH_START = ("custom_scalars__config__", "_hparams_/", "data/document_lengths")  # written again at each start
_OF_EVALUATIONS = tuple(
    tag
    for kind in EVENTS.values()
    if kind.tags and kind is not AlertEvent
    for tag in (kind.tags, *(metric.first for metric in metrics_of(kind).values() if metric.first))
)
"""Beginnings of the tags that a resume removes with an evaluation."""
_ALERT = re.compile(r"\*\*(\w+)\*\* \(\w+, (\w+)\)")  # rule and action in the text of an alert


def cut_event_files(directory: Path, cut_off: CutOff | None) -> list[Event]:
    """Remove the records that the state does not cover; all records if the run is new.

    A running TensorBoard has read the files already. It drops points from a step on, but never a part of a step. So all points of a
    step that is not covered whole are removed, and those that the state covers are returned, to be written again.
    """
    paths = sorted(directory.glob("events.out.tfevents.*"))
    if cut_off is None:
        for path in paths:
            path.unlink()
        return []
    selection, points = Selection(cut_off), list[Event]()
    whole, without_points = ({path: list[tuple[int, int]]() for path in paths} for _ in range(2))
    for path in paths:
        for start, end, event in _known_records(path, selection):
            _extend(whole[path], start, end)
            if event.HasField("summary") and event.step == cut_off.step:
                points.append(event)
            else:
                _extend(without_points[path], start, end)
    for path, parts in (without_points if selection.dropped_here else whole).items():
        if parts == [(0, path.stat().st_size)]:
            continue
        with _opened(path) as file:
            content = bytearray()
            for start, end in parts:
                file.seek(start)
                content += file.read(end - start)
        write_atomic(path, bytes(content))
    return points if selection.dropped_here else []


def _extend(parts: list[tuple[int, int]], start: int, end: int) -> None:
    if parts and parts[-1][1] == start:
        start = parts.pop()[0]
    parts.append((start, end))


def _known_records(path: Path, selection: Selection) -> Iterator[tuple[int, int, Event]]:
    is_count_of_dropped = False
    for start, record in _records(path):
        try:
            event = Event.FromString(record[_HEAD_BYTES:-_TAIL_BYTES])
        except DecodeError:
            return  # no reader continues after a damaged record
        # this program writes one value in each event
        tag = str(event.summary.value[0].tag) if event.HasField("summary") and event.summary.value else ""
        if is_count_of_dropped and tag.startswith("health/alerts_"):  # the count of a rule follows its alert
            is_count_of_dropped = False
            continue
        is_alert = tag.startswith(AlertEvent.tags)
        rule, action = _alert(event) if is_alert else ("", "")
        of_evaluation = tag.startswith(_OF_EVALUATIONS) or (rule in RULES and RULES[rule].of_evaluation)
        is_known = event.HasField("file_version") or selection.keeps(
            event.step, of_evaluation=of_evaluation, rule=rule, action=action
        )
        is_count_of_dropped = is_alert and not is_known
        if is_known and not tag.startswith(_OF_EACH_START):
            yield start, start + len(record), event


def _alert(event: Event) -> tuple[str, str]:
    texts = event.summary.value[0].tensor.string_val
    found = _ALERT.match(texts[0].decode(errors="replace")) if texts else None
    return (found[1], found[2]) if found else ("", "")


def _records(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the start of each complete record of a file, and the record. A record that a kill cut off is skipped."""
    with _opened(path) as file:
        start, size = 0, path.stat().st_size
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            (length,) = struct.unpack_from("<Q", head)
            end = start + _HEAD_BYTES + length + _TAIL_BYTES
            if end > size:
                return
            yield start, head + file.read(length + _TAIL_BYTES)
            start = end


def _opened(path: Path) -> BinaryIO:
    try:
        return open_input(path, below=path.parent)
    except UnusableFileError as error:
        raise CheckpointError(str(error)) from None
