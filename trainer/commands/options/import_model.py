"""Options of `import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Options, Place

__all__ = ["ImportOptions"]


class ImportOptions(Options):
    """Makes a run of a published model: a Hugging Face directory with a Qwen3 or Llama model and its tokenizer."""

    directory: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(
        description="Directory with config.json, *.safetensors, and tokenizer.json or tokenizer.model."
    )
    output: Annotated[Path, Place(metavar="RUN", target="folder")] = Field(
        description="Directory of the new run. It must not exist."
    )
