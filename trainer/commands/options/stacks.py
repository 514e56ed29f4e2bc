"""Options of `stacks`."""

from __future__ import annotations

from trainer.commands.options.saved_run import RunOptions

__all__ = ["StacksOptions"]


class StacksOptions(RunOptions):
    """Prints what each rank of a running training does at this moment: the stacks of its threads."""
