"""Options of `tune`."""

from __future__ import annotations

from trainer.search.options import SearchOptions

__all__ = ["TuneOptions"]


class TuneOptions(SearchOptions):
    """Searches for the settings of a recipe with the lowest validation loss. The same command continues a search."""
