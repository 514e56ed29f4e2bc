"""`prepare`: turns text into rows."""

from __future__ import annotations

import sys

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import prepare
from data_pipeline.reports.summary import summary_lines
from data_pipeline.reports.terminal import malformed

__all__ = ["run"]


def run(config: PrepareConfig) -> None:
    """Prepare the data, print a summary on stderr, and print the root digest. Raises the errors of `prepare`."""
    manifest = prepare(config)
    with malformed(config.output):
        lines = summary_lines(manifest, config)
    print("\n".join(lines), file=sys.stderr)
    print(f"root digest {manifest.root_digest}")
