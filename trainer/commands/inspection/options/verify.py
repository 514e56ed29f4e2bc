"""Options of `verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Place
from trainer.commands.options.saved_run import TrustOptions

__all__ = ["VerifyOptions"]


class VerifyOptions(TrustOptions):
    """Checks a run, level by level. The first check that fails ends the command with exit code 3 (data) or 4 (run).

    If the directory is not of a run but was written by `export`, its files are checked.
    """

    level: Literal["integrity", "environment", "data", "replay"] = Field("environment", description="The highest level to check.")
    replay: Annotated[int | None, Place(metavar="N")] = Field(
        None, ge=1, description="Number of steps to train again and compare bit for bit, at any level."
    )
    start: Annotated[int | None, Place("--from", metavar="STEP")] = Field(
        None, ge=0, description="Step whose checkpoint the replay starts from. 0 starts from the seed."
    )
    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Directory of the prepared data. Without it, the directory that the run has used."
    )
    sources: Annotated[tuple[str, ...], Place(metavar="PATH")] = Field(
        (), description="Sources that the level `data` prepares again. NAME=PATH gives a source a name."
    )
    export: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Directory that `export` wrote from the run. It is compared with the run, and no level is checked."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.start is not None and self.replay is None and self.level != "replay":
            raise ValueError("--from sets the first step of a replay; add --replay N or --level replay, or leave out --from")
        if self.sources and self.level not in ("data", "replay"):
            raise ValueError("--sources is only for a level that prepares data again; add --level data, or leave out --sources")
        if self.export is not None and (self.replay or self.sources or self.data or "level" in self.model_fields_set):
            raise ValueError(
                "--export compares a directory with the run and checks no level; leave out --level, --replay, --data and "
                "--sources, or run verify a second time with them"
            )
        return self
