"""Curves, histograms, texts and pictures for TensorBoard, in the run's directory."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from common.errors import StorageError
from trainer.machine.gpus import GpuReading
from trainer.machine.sampler import HostReading
from trainer.metrics.layers import BIN_LIMITS, Histogram, LayerReading
from trainer.metrics.sinks.base import RunFacts, Sink, StepMetrics, hyper_parameters
from trainer.metrics.sinks.event_files import cut_event_files
from trainer.report.pictures import Picture, confusion_picture, length_histogram, perplexity_bars
from trainer.runs.events import EVENTS, GROWTH, AlertEvent, EvalEvent, Event, MeasuresEvent, SampleEvent, ScoresEvent
from trainer.runs.layout import make_folder
from trainer.runs.metric import encodable, metrics_of, title_of
from trainer.runs.metrics_file import CutOff

_EDGES = (-(2.0**40), *BIN_LIMITS, 2.0**40)  # limits of the bins, with an end for each of the outermost two bins


class TensorBoardSink(Sink):
    """Writes curves every few steps and other events at once. Records after the cut-off are removed, so no step appears twice."""

    def __init__(self, directory: Path, cut_off: CutOff | None, every_steps: int) -> None:
        self._directory = make_folder(directory)
        self._writer = self._cut(cut_off)
        self._every_steps = every_steps
        self._comparison: Any = ()  # what the HParams plugin reads: the experiment, the start of this run, and its end
        self._lengths: Picture | None = None
        self._unwritten: StepMetrics | None = None

    def begin(self, facts: RunFacts) -> None:
        compared = [metric.curve for kind in EVENTS.values() for metric in metrics_of(kind).values() if metric.compared]
        values = hyper_parameters(facts.settings)
        self._comparison = hparams(values, dict.fromkeys(compared, 0.0))  # type: ignore[no-untyped-call]
        self._lengths = length_histogram(facts.report)
        self._begin()

    def model(self, graph: bytes) -> None:
        files: Any = self._writer.file_writer
        files.add_event(event_pb2.Event(graph_def=graph))

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
                    picture = perplexity_bars(scores, f"Perplexity by {by}, step {event.step}")
                    self._writer.add_image(f"validation/perplexity_by_{by}", picture, event.step, dataformats="HWC")
            self._writer.flush()
        if isinstance(event, MeasuresEvent) and event.confusion:
            picture = confusion_picture(event.confusion, f"Confusion of labels, step {event.step}")
            self._writer.add_image(f"{event.tags}confusion", picture, event.step, dataformats="HWC")

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
        self._begin()
        self._unwritten = None

    def sync(self) -> None:
        """Hand all points to the system, because a run that resumes from a checkpoint does not write the points before it again."""
        self._writer.flush()

    def finish(self, status: str) -> None:
        if status == "finished":
            self._add_summaries(self._comparison[-1:])

    def close(self) -> None:
        """Add the points of the last step, by which runs are compared, and write all records in memory."""
        try:
            if self._unwritten is not None:
                self._add_points(self._unwritten)
        finally:
            self._writer.close()

    def _begin(self) -> None:
        self._writer.add_custom_scalars(layout())
        self._add_summaries(self._comparison[:2])
        if self._lengths is not None:
            self._writer.add_image("data/document_lengths", self._lengths, 0, dataformats="HWC")

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
