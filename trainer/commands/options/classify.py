"""Options of `classify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from trainer.commands.options.saved_run import CheckpointOptions

__all__ = ["ClassifyOptions"]


class ClassifyOptions(CheckpointOptions):
    """Prints the label of each text, with the probability of each label, as a JSON object in a line."""

    files: Annotated[tuple[Path, ...], Place(metavar="FILE", positional=True)] = Field(
        min_length=1, description="Files with texts: one text in each line of a .jsonl file; any other file is one text."
    )
    field: Annotated[str, Place(metavar="NAME")] = Field(
        "text", min_length=1, description="Name of the field that holds the text in a .jsonl file."
    )
    lines: bool = Field(False, description="Read each line of a file as one text, also if it is not a .jsonl file.")
    batch: int = Field(16, ge=1, le=65536, description="Number of texts that are classified together.")
