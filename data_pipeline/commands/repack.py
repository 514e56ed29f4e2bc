from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from data_pipeline.commands.folder_options import FolderOptions


class RepackOptions(FolderOptions):
    """Packs the documents of prepared data into rows of another length."""

    output: Annotated[Path, Place(metavar="DIR", target="folder")] = Field(description="Folder that receives the result.")
    row_length: Annotated[int, Place(metavar="N")] = Field(ge=8, le=1 << 20, description="Number of tokens in a row.")
    workers: Annotated[int | None, Place(metavar="N")] = Field(
        None, ge=1, le=4096, description="Number of worker processes. Default: one for each core."
    )
    replace: bool = Field(False, description="Replace other finished data in the output folder.")


def run(options: RepackOptions) -> None:
    from data_pipeline.repack import repack

    manifest = repack(options.directory, options.output, options.row_length, options.workers, replace=options.replace)
    print(f"root digest {manifest.root_digest}")
