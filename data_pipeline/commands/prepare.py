"""`prepare`: turns text into rows."""

from __future__ import annotations

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare

__all__ = ["run"]


def run(config: PrepareConfig) -> None:
    """Prepare the data and print the root digest. Raises the errors of `prepare`."""
    print(f"root digest {prepare(config).root_digest}")
