"""`metrics.jsonl`: one JSON object on each line, for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from common.errors import StorageError
from common.files import sync_directory, write_atomic
from common.storage_errors import explain_os_error, naming
from trainer.metrics.sinks.base import Sink
from trainer.runs.events import AlertEvent, Event, HardwareEvent
from trainer.runs.layout import open_own
from trainer.runs.metrics_file import CutOff, lines_until


class JsonLinesSink(Sink):
    """Writes each event as one line; each step appears once. Every method raises StorageError if the file cannot be written."""

    def __init__(self, path: Path, cut_off: CutOff | None) -> None:
        self._path = path
        with self._stored():
            if path.exists():
                write_atomic(path, b"" if cut_off is None else _known_lines(path, cut_off))
            self._file = self._opened()
            sync_directory(path.parent)

    def write(self, event: Event) -> None:
        line = json.dumps(event.to_json(), ensure_ascii=False) + "\n"
        with self._stored():
            self._file.write(line)
            self._file.flush()

    def rewind(self, cut_off: CutOff) -> None:
        with self._stored():
            self._file.close()
            write_atomic(self._path, _known_lines(self._path, cut_off))
            self._file = self._opened()

    def sync(self) -> None:
        """Force all lines to the device, because a run that resumes from a checkpoint needs those of all steps before it."""
        with self._stored():
            os.fsync(self._file.fileno())

    def close(self, status: str | None = None) -> None:
        with self._stored():
            self._file.close()

    def _opened(self) -> IO[str]:
        """Open the file. A lone surrogate, which UTF-8 cannot hold, is written as JSON's escape of it."""
        descriptor = open_own(self._path, os.O_WRONLY | os.O_APPEND, run=self._path.parent)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")

    @contextmanager
    def _stored(self) -> Iterator[None]:
        try:
            with naming(self._path):
                yield
        except OSError as error:
            raise StorageError(explain_os_error(error)) from error


class NodeHardwareSink(JsonLinesSink):
    """Writes readings and alerts of a further machine to a separate file; all other events are those of the first machine."""

    def write(self, event: Event) -> None:
        if isinstance(event, HardwareEvent | AlertEvent):
            super().write(event)


def _known_lines(path: Path, cut_off: CutOff) -> bytes:
    lines = (line for line, _ in lines_until(path, cut_off))
    return b"".join(line + b"\n" for line in lines)  # a kill can leave a whole line without its end
