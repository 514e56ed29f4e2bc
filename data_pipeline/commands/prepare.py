from __future__ import annotations

import sys

from data_pipeline.config import PrepareConfig


def run(config: PrepareConfig) -> None:
    """Turns text into packed, tokenised rows for training."""
    from data_pipeline.prepare import prepare
    from data_pipeline.reports.terminal import malformed, summary_lines

    manifest = prepare(config)
    with malformed(config.output):
        lines = summary_lines(manifest, config)
    print("\n".join(lines), file=sys.stderr)
    print(f"root digest {manifest.root_digest}")
