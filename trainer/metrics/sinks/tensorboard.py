"""Curves, histograms, texts and pictures for TensorBoard, in the run's directory.

The packages that draw pictures take 2 s of CPU to import, so pictures are drawn only when the first checkpoint is saved. A run that
stops before that begins again at its first step, so its files need none.
"""

from __future__ import annotations

import logging
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from common.errors import CheckpointError, StorageError
from common.files import UnusableFileError, open_input, write_atomic
from trainer.machine.sampler import GpuReading, HostReading
from trainer.metrics.layers import BIN_LIMITS, Histogram, LayerReading
from trainer.metrics.sinks.base import RunFacts, Sink, StepMetrics, hyper_parameters
from trainer.runs.events import EVENTS, GROWTH, AlertEvent, EvalEvent, Event, MeasuresEvent, SampleEvent, Score, ScoresEvent
from trainer.runs.layout import make_folder
from trainer.runs.metric import encodable, metrics_of, title_of
from trainer.runs.metrics_file import CutOff, Selection
from trainer.runs.rules import RULES

_log = logging.getLogger(__name__)

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


# TensorBoard's server hides all points from the step of a `SessionLog` START on. Its `EventAccumulator` does not hide texts, and no
# reader can hide a part of a step. So the points are removed from the files, as lines are removed from `metrics.jsonl`. A file is a
# sequence of records: length (8 bytes, little-endian), checksum (4), a serialised `Event`, checksum (4).


def cut_event_files(directory: Path, cut_off: CutOff | None) -> list[event_pb2.Event]:
    """Remove the records that the state does not cover; all records if the run is new.

    A running TensorBoard has read the files already. It drops points from a step on, but never a part of a step. So all points of a
    step that is not covered whole are removed, and those that the state covers are returned, to be written again.
    """
    paths = sorted(directory.glob("events.out.tfevents.*"))
    if cut_off is None:
        for path in paths:
            path.unlink()
        return []
    selection, points = Selection(cut_off), list[event_pb2.Event]()
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


def _known_records(path: Path, selection: Selection) -> Iterator[tuple[int, int, event_pb2.Event]]:
    is_count_of_dropped = False
    for start, record in _records(path):
        try:
            event = event_pb2.Event.FromString(record[_HEAD_BYTES:-_TAIL_BYTES])
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


def _alert(event: event_pb2.Event) -> tuple[str, str]:
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


if TYPE_CHECKING:
    from trainer.report.pictures import Picture

_EDGES = (-(2.0**40), *BIN_LIMITS, 2.0**40)  # limits of the bins, with an end for each of the outermost two bins


class TensorBoardSink(Sink):
    """Writes curves every few steps and other events at once. Records after the cut-off are removed, so no step appears twice."""

    def __init__(self, directory: Path, cut_off: CutOff | None, every_steps: int) -> None:
        self._directory = make_folder(directory)
        self._writer = self._cut(cut_off)
        self._every_steps = every_steps
        self._comparison: Any = ()  # what the HParams plugin reads: the experiment, the start of this run, and its end
        self._report: Mapping[str, Any] = {}  # of the data
        self._undrawn: list[Callable[[], None]] | None = []  # pictures; None after the first checkpoint
        self._unwritten: StepMetrics | None = None

    def begin(self, facts: RunFacts) -> None:
        compared = [metric.curve for kind in EVENTS.values() for metric in metrics_of(kind).values() if metric.compared]
        values = hyper_parameters(facts.settings)
        self._comparison = hparams(values, dict.fromkeys(compared, 0.0))  # type: ignore[no-untyped-call]
        self._report = facts.report
        self._begin()

    def write(self, event: Event) -> None:
        if isinstance(event, StepMetrics):
            due = event.is_due(self._every_steps)
            self._unwritten = None if due else event
            if not due:
                if not event.is_finite:  # curves leave such a point out, so it is counted at its step
                    self._writer.add_scalar("health/non_finite_steps", float(event.non_finite_steps), event.step)
                return
        if isinstance(event, AlertEvent):
            text = f"**{event.rule}** ({event.severity}, {event.action}): {event.message}"
            self._writer.add_text("alert", encodable(text), event.step)
        self._add_points(event)
        if isinstance(event, EvalEvent):
            for by, scores in event.groups.items():
                if scores and event.has_perplexity:
                    self._add_perplexities(by, scores, event.step)
            self._writer.flush()
        if isinstance(event, MeasuresEvent) and event.confusion:
            title, confusion = f"Confusion of labels, step {event.step}", event.confusion
            self._add_picture(f"{event.tags}confusion", event.step, lambda pictures: pictures.confusion_picture(confusion, title))

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        for number, sample in enumerate(samples):
            indented = "\n".join(f"    {line}" for line in encodable(sample.whole).splitlines())
            self._writer.add_text("sample" if len(samples) == 1 else f"sample/{number}", indented, step)
        super().samples(step, (), scores)

    def histograms(self, reading: LayerReading) -> None:
        self._add_histograms("gradients", reading.gradients, reading.step)
        self._add_histograms("weights", reading.weights, reading.step)

    def rewind(self, cut_off: CutOff) -> None:
        self._writer.close()
        self._writer = self._cut(cut_off)
        if self._undrawn is not None:  # they are of the steps that are taken back
            self._undrawn = []
        self._begin()
        self._unwritten = None

    def sync(self) -> None:
        """Hand all points to the system, because a run that resumes from a checkpoint does not write the points before it again."""
        self._draw_all()
        self._writer.flush()

    def close(self, status: str | None = None) -> None:
        """Add the points of the last step, by which runs are compared, and write all records in memory."""
        try:
            if status == "finished":
                self._add_summaries(self._comparison[-1:])
            if self._unwritten is not None:
                self._add_points(self._unwritten)
        finally:
            self._writer.close()

    def _begin(self) -> None:
        self._writer.add_custom_scalars(layout())
        self._add_summaries(self._comparison[:2])
        self._add_picture("data/document_lengths", 0, lambda pictures: pictures.length_histogram(self._report))

    def _draw_all(self) -> None:
        draws, self._undrawn = self._undrawn or (), None
        for draw in draws:
            try:
                draw()
            except Exception as error:  # a checkpoint waits for this
                _log.warning("TensorBoard lacks a picture: %s: %s", type(error).__name__, error)

    def _add_picture(self, tag: str, step: int, picture: Callable[[Any], Picture | None]) -> None:
        def add() -> None:
            from trainer.report import pictures

            if (drawn := picture(pictures)) is not None:
                self._writer.add_image(tag, drawn, step, dataformats="HWC")

        if self._undrawn is None:
            add()
        else:
            self._undrawn.append(add)

    def _add_perplexities(self, by: str, scores: Mapping[str, Score], step: int) -> None:
        title = f"Perplexity by {by}, step {step}"
        self._add_picture(f"validation/perplexity_by_{by}", step, lambda pictures: pictures.perplexity_bars(scores, title))

    def _cut(self, cut_off: CutOff | None) -> SummaryWriter:
        try:
            again = cut_event_files(self._directory, cut_off)
        except OSError as error:
            raise StorageError(
                f"{self._directory}: {error.strerror}; make room or give access, and run the same command again"
            ) from error
        void_from = 0 if cut_off is None else cut_off.step + (not again)
        # TensorBoard makes names of time, host and process, so a link of that name could exist. A random name cannot.
        writer = SummaryWriter(str(self._directory), purge_step=void_from, filename_suffix=f".{secrets.token_hex(8)}")
        files: Any = writer.file_writer
        for event in again:
            files.event_writer.add_event(event)
        return writer

    def _add_points(self, event: Event) -> None:
        first = {metric.curve: metric.first for metric in metrics_of(type(event)).values() if metric.first}
        for tag, value in event.points().items():
            self._writer.add_scalar(tag, value, event.step)
            if tag in first:
                self._writer.add_scalar(first[tag], value, event.step)

    def _add_summaries(self, summaries: Iterable[Any]) -> None:
        files: Any = self._writer.file_writer
        for summary in summaries:
            files.add_summary(summary)

    def _add_histograms(self, kind: str, histograms: Mapping[str, Histogram], step: int) -> None:
        for layer, histogram in histograms.items():
            held = np.flatnonzero(histogram.counts)
            if not len(held):
                continue
            first, last = int(held[0]), int(held[-1])
            self._writer.add_histogram_raw(
                f"{kind}/{layer}",
                min=_EDGES[first],
                max=_EDGES[last + 1],
                num=int(histogram.counts.sum()),
                sum=histogram.total,
                sum_squares=histogram.squares,
                bucket_limits=list(_EDGES[first + 1 : last + 2]),
                bucket_counts=histogram.counts[first : last + 1].tolist(),
                global_step=step,
            )


_CATEGORIES = ("Loss", "Optimisation", "Speed", "Hardware", "Health")
_NO_NUMBERS = ("index", "name", "throttle")
_DEVICES = {
    "GPU": [field.name for field in fields(GpuReading) if field.name not in _NO_NUMBERS] + ["throttled", GROWTH],
    "host": [field.name for field in fields(HostReading)] + [GROWTH],
}


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the categories of the custom scalars tab, with the charts that the metrics name; tags are regular expressions."""
    tags: dict[str, dict[str, list[str]]] = {category: {} for category in _CATEGORIES}
    for kind in EVENTS.values():
        for metric in metrics_of(kind).values():
            if metric.chart:
                category, _, title = metric.chart.partition(": ")
                tag = metric.curve.replace("{}", ".*") if "{}" in metric.curve else f"{metric.curve}$"
                tags[category].setdefault(title, []).append(tag)
    for device, names in _DEVICES.items():
        for name in names:
            title, unit = title_of(name)
            tags["Hardware"][f"{device}: {title}, {unit}"] = [f"{'gpu_.*' if device == 'GPU' else device}/{name}$"]
    return {category: {title: ["Multiline", found] for title, found in charts.items()} for category, charts in tags.items()}
