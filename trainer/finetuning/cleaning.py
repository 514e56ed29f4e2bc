"""Cleans the texts that `classify` gets as `prepare` has cleaned those of the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import ValidationError

from common.errors import CheckpointError, ConfigError
from data_pipeline.filters.judge import opened_cleaner
from trainer.runs.record import Cleaning


@contextmanager
def opened_cleaning(run: Path, recorded: Sequence[Cleaning], source: str | None) -> Iterator[Callable[[str], str]]:
    """Yield what cleans a text. A run whose record says nothing about it gets its texts as they are."""
    names = [name for one in recorded for name in one.sources]
    if source is not None and source not in names:
        known = f"the sources of its data are {', '.join(names)}" if names else "its record names no source of its data"
        raise ConfigError(f"--source {source}: {known}")
    if source is None and len(recorded) > 1:
        raise ConfigError(
            f"{run}: the sources of its data were cleaned in different ways; name the one whose texts are like these with "
            f"--source: {', '.join(names)}"
        )
    if not recorded:
        yield lambda text: text
        return
    chosen = next(one for one in recorded if source is None or source in one.sources)
    with ExitStack() as stack:
        try:
            clean = stack.enter_context(opened_cleaner(chosen.model_dump()))
        except ValidationError as error:
            raise CheckpointError(f"{run}: data.cleaning of its record cannot be used ({error}); restore it from a copy") from None
        yield clean
