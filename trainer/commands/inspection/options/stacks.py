"""Options of `stacks`."""

from __future__ import annotations

from trainer.commands.options.saved_run import RunOptions

__all__ = ["StacksOptions"]


class StacksOptions(RunOptions):
    """Prints the stacks of all threads of each rank of a running training."""
