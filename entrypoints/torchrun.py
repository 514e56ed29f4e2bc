"""Starts the ranks of this node: see `trainer.launch.agent`."""

from __future__ import annotations

import sys

from trainer.launch.agent import launch

if __name__ == "__main__":
    sys.exit(launch())
