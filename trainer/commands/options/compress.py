"""Options of `compress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from common.settings.model import Place
from trainer.commands.options.saved_run import CheckpointOptions
from trainer.compression import Method

__all__ = ["CompressOptions"]


class CompressOptions(CheckpointOptions):
    """Writes a smaller copy of the model of a checkpoint as a new run, and compares both.

    The new run works with `generate`, `evaluate`, `export` and `train --init`. It cannot be continued.
    """

    method: Method = Field(
        description="int8, int4: fewer bits for each weight; prune: the smallest weights become zero; prune-2-4: the "
        "smaller two of four neighbouring weights become zero."
    )
    output: Annotated[Path, Place(metavar="DIR", target="folder")] = Field(
        description="Directory of the new run. It must not exist."
    )
    group_size: int = Field(32, ge=2, le=1 << 16, description="Number of columns of a matrix that share a scale with int4.")
    share: float = Field(0.5, gt=0, lt=1, description="Share of the weights of each matrix that prune sets to zero.")
    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Prepared data for the perplexity. Without it, the data of the run is used if it is there."
    )
    limit: Annotated[int | None, Place(metavar="N")] = Field(
        None, ge=1, description="Number of validation rows for the perplexity. Without it, as many rows as in the run."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object instead of the table.")

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        for name, method in (("group_size", "int4"), ("share", "prune")):
            if name in self.model_fields_set and self.method != method:
                raise ValueError(
                    f"--{name} has an effect only with --method {method}, and the method is {self.method}; leave it out"
                )
        return self
