"""The run in MLflow. The package is optional; a folder as `log.mlflow_uri` needs no server.

This sink uses MLflow's client, not its global functions, so nothing outside this run is changed. A thread of MLflow sends points
and tags, and a thread of this sink sends texts and the end, because MLflow tries for minutes to reach a store that is down, and no
step may wait for that. Training goes on, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import write_atomic
from common.redaction import redacted, secrets_of, without
from trainer.metrics.sinks.base import RunFacts, ServiceSink, hyper_parameters, imported
from trainer.runs.events import AlertEvent, Event, SampleEvent, ScoresEvent
from trainer.runs.layout import read_id
from trainer.runs.metric import encodable

_log = logging.getLogger(__name__)
_LONGEST_VALUE = 500
_PARAMETERS_AT_ONCE = 100
_WAITED_FOR = 256  # number of newest calls whose success is checked when the run ends; older calls have ended by then
_END_S = 20.0


class MlflowSink(ServiceSink):
    """Sends curves every few steps, and samples as files. A run that resumes is the same run there."""

    def __init__(self, run: Path, uri: str, experiment: str, every_steps: int) -> None:
        super().__init__(f"log.mlflow_uri = {redacted(uri)}", every_steps)
        self._secrets = secrets_of(uri)
        if self._secrets:
            os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # else it prints the address with secrets
        # Several threads of MLflow that write to a folder at once fail: one finds the subfolder that another has just made.
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE", "1")
        self._mlflow = imported("mlflow", "log.mlflow_uri", "mlflow-skinny")
        self._id_file = run / ".mlflow-id"
        self._uri, self._experiment = uri, experiment
        self._client: Any = None
        self._id = ""
        self._sending: deque[Callable[[], object]] = deque(maxlen=_WAITED_FOR)  # functions that wait for the newest calls
        self._is_open = False

    def begin(self, facts: RunFacts) -> None:
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=self._uri)
            if (known := read_id(self._id_file, run=self._id_file.parent)) is not None:
                self._id = known
                self._client.update_run(self._id, status="RUNNING")
            else:
                found = self._client.get_experiment_by_name(self._experiment)
                experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
                self._id = self._client.create_run(experiment, run_name=facts.name).info.run_id
                values = {name: str(value)[:_LONGEST_VALUE] for name, value in hyper_parameters(facts.settings).items()}
                parameters = [self._mlflow.entities.Param(name, value) for name, value in values.items()]
                for first in range(0, len(parameters), _PARAMETERS_AT_ONCE):
                    self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS_AT_ONCE])
                write_atomic(self._id_file, self._id.encode())
        except Exception as error:
            raise ConfigError(
                f"{self._place}: the store does not take the run ({without(str(error), self._secrets)}); "
                "start the server, name a folder, or leave log.mlflow_uri out"
            ) from None
        self._is_open = True

    def write(self, event: Event) -> None:
        if isinstance(event, AlertEvent):
            self._send(lambda: self._client.set_tag(self._id, f"alert.{event.rule}", event.message, synchronous=False))
        super().write(event)

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        text = "\n\n".join(encodable(sample.whole) for sample in samples)
        if text and self._reachable:
            path = f"samples/step-{step:08d}.txt"
            self._sending.append(self._started(lambda: self._attempt(lambda: self._client.log_text(self._id, text, path))).join)
        super().samples(step, (), scores)

    def close(self, status: str | None = None) -> None:
        if not self._is_open:
            return
        outcome = {"finished": "FINISHED", "stopped": "KILLED"}.get(status or "", "FAILED")

        def wait_and_end() -> None:
            while self._sending and self._reachable:
                self._attempt(self._sending.popleft())
            if self._reachable:
                self._attempt(lambda: self._client.set_terminated(self._id, outcome))

        self._is_open = False
        ending = self._started(wait_and_end)
        ending.join(_END_S)
        if ending.is_alive():
            _log.warning(
                "%s: the store does not answer; the newest points and the end of the run may be missing there", self._place
            )

    def _add(self, step: int, points: Mapping[str, float]) -> None:
        if not points:
            return
        now = int(time.time() * 1000)
        metrics = [
            self._mlflow.entities.Metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)  # other characters are not allowed
            for name, value in points.items()
        ]
        self._send(lambda: self._client.log_batch(self._id, metrics=metrics, synchronous=False))

    def _send(self, call: Callable[[], Any]) -> None:
        self._attempt(lambda: self._sending.append(call().wait))

    @staticmethod
    def _started(action: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=action, name="mlflow", daemon=True)
        thread.start()
        return thread
