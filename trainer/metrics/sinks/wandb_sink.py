"""The run in Weights & Biases. The package is optional; `WANDB_MODE=offline` keeps the numbers for `wandb sync`."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files import write_atomic
from trainer.metrics.sinks.base import RunFacts, ServiceSink, hyper_parameters, imported
from trainer.runs.events import AlertEvent, Event, SampleEvent, ScoresEvent
from trainer.runs.layout import read_id
from trainer.runs.metric import encodable


class WandbSink(ServiceSink):
    """A resumed run is the same run there. `step` is a number and the axis of all curves, because a rollback repeats steps."""

    def __init__(self, run: Path, project: str, every_steps: int) -> None:
        super().__init__(f"log.wandb_project = {project}", every_steps)
        self._wandb = imported("wandb", "log.wandb_project", "wandb")
        self._directory, self._project = run, project
        self._run: Any = None

    def begin(self, facts: RunFacts) -> None:
        try:
            self._run = self._wandb.init(
                project=self._project,
                name=facts.name,
                id=remembered_id(self._directory / ".wandb-id"),
                resume="allow",
                dir=str(self._directory),
                config=hyper_parameters(facts.settings),
            )
        except Exception as error:
            raise ConfigError(
                f"Weights & Biases does not start ({error}); log in with `wandb login` or WANDB_API_KEY, set WANDB_MODE=offline, "
                "or leave log.wandb_project out"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, event: Event) -> None:
        if isinstance(event, AlertEvent):
            self._attempt(lambda: self._run.alert(title=event.rule, text=event.message))
        super().write(event)

    def samples(self, step: int, samples: Sequence[SampleEvent], scores: ScoresEvent | None) -> None:
        rows = [[step, encodable(sample.prompt), encodable(sample.text)] for sample in samples]
        table = {"samples": self._wandb.Table(columns=["step", "prompt", "text"], data=rows)} if rows else {}
        self._add(step, table if scores is None else scores.points() | table)

    def close(self, status: str | None = None) -> None:
        """End the run in the service; a run that failed is shown as failed."""
        if self._run is not None:
            if status is not None:
                self._attempt(lambda: self._run.summary.update({"status": status}))
            self._attempt(lambda: self._run.finish(exit_code=1 if status is None else 0))

    def _add(self, step: int, points: Mapping[str, Any]) -> None:
        if points:
            self._attempt(lambda: self._run.log({"step": step, **points}))


def remembered_id(path: Path) -> str:
    if (known := read_id(path, run=path.parent)) is not None:
        return known
    fresh = uuid.uuid4().hex[:16]
    write_atomic(path, fresh.encode())
    return fresh
