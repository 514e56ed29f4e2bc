"""`prepare`: turns text into rows."""

from __future__ import annotations

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare

__all__ = ["run"]


def run(config: PrepareConfig) -> None:
    """Prepares and prints the root digest; raises as `prepare` does."""
    print(f"root digest {prepare(config).root_digest}")
