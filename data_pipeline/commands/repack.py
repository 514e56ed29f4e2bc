"""`repack`: packs the same documents into rows of another length."""

from __future__ import annotations

from data_pipeline.commands.options.repack import RepackOptions
from data_pipeline.repack import repack

__all__ = ["run"]


def run(options: RepackOptions) -> None:
    """Pack the documents and print the root digest. Raises the errors of `repack`."""
    manifest = repack(options.directory, options.output, options.row_length, options.workers, replace=options.replace)
    print(f"root digest {manifest.root_digest}")
