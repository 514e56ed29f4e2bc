"""Options of `verify`."""

from __future__ import annotations

from data_pipeline.commands.options.folder import FolderOptions

__all__ = ["VerifyOptions"]


class VerifyOptions(FolderOptions):
    """Checks every digest of prepared data and names the first file that does not match."""
