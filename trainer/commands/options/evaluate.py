"""Options of `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Place
from trainer.commands.options.saved_run import CheckpointOptions

__all__ = ["EvaluateOptions"]


class EvaluateOptions(CheckpointOptions):
    """Measures how well a checkpoint predicts the validation text of its run, or of other data."""

    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Prepared data to evaluate on. Without it, the data of the run is used."
    )
    by: Literal["source", "kind", "length", "all"] | None = Field(
        None, description="Also show the loss of each group of the text: by source, by kind, or by length of documents."
    )
    lm_eval: Annotated[str | None, Place("--lm-eval", metavar="TASKS")] = Field(
        None, description="Tasks of lm-evaluation-harness to run instead: names separated by commas, or a folder with tasks."
    )
    limit: Annotated[int | None, Place(metavar="N")] = Field(
        None,
        ge=1,
        description="Number of validation rows, or of examples of each task. Without it, the number of rows of the run, or all "
        "examples.",
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")

    @property
    def groups(self) -> tuple[str, ...]:
        return ("source", "kind", "length") if self.by == "all" else () if self.by is None else (self.by,)

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if self.lm_eval is not None and (self.data is not None or self.by is not None):
            raise ValueError("--lm-eval brings its own texts; leave out --data and --by, or run evaluate a second time with them")
        return self
