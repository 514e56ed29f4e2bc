"""The options of the command `tune`: what a search is asked to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.model import Options, Place
from trainer.config.run import LimitsConfig

Pruner = Literal["median", "asha", "none"]
Sampler = Literal["tpe", "random", "grid"]


class TuneOptions(Options):
    """Searches for the settings of a recipe with the lowest validation loss. The same command continues a search."""

    recipe: Annotated[str, Place(metavar="RECIPE")] = Field(
        description="Recipe with the settings that all trials share: its name in env/recipes, a .toml file, or auto."
    )
    space: Annotated[Path, Place(metavar="FILE")] = Field(
        description="TOML file with the settings that the trials vary, and their values."
    )
    output: Annotated[Path, Place(metavar="DIR", target="folder")] = Field(
        description="Folder of the search: its study, runs, best.toml, report.html."
    )
    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Directory that `trainer prepare` wrote. Without it, TRAIN_DATA or the recipe names it."
    )
    trials: Annotated[int | None, Place(metavar="N")] = Field(
        None, ge=1, le=100_000, description="The search ends when this many trials are finished or pruned."
    )
    minutes: Annotated[float | None, Place(metavar="M")] = Field(
        None, gt=0, description="The search stops after this many minutes, over all its starts; unfinished trials can be continued."
    )
    parallel: Annotated[int, Place(metavar="N")] = Field(
        1, ge=1, le=64, description="Number of trials that run at the same time. They share the cores and the GPUs evenly."
    )
    sampler: Sampler = Field(
        "tpe", description="Choice of the values. tpe: learns from earlier trials; random: does not; grid: all combinations."
    )
    pruner: Pruner = Field(
        "median",
        description="Rule that ends bad trials early. median: worse than half of the finished trials at the same step; "
        "asha: not in the best third at steps 1, 3, 9, … times --prune_from; none: no trial ends early.",
    )
    prune_from: Annotated[int | None, Place(metavar="STEP")] = Field(
        None, ge=1, description="First step at which a trial may end early. Without it, the first evaluation after every warm-up."
    )
    keep_checkpoints: Literal["all", "best"] = Field(
        "all",
        description="Trials whose checkpoints stay. best: those of the best trial and of unfinished ones; all other files of the "
        "runs stay.",
    )
    killed: Literal["stop", "fail"] = Field(
        "stop",
        description="Trial whose processes were killed three times, as for lack of memory. stop: the search ends, and its next "
        "start continues the trial; fail: the trial counts as failed.",
    )
    seed: int = Field(0, ge=0, lt=1 << 32, description="Seed of the choice of values. The seed of the trainings is in the recipe.")
    limits: LimitsConfig = Field(LimitsConfig(), description="Limits of each trial, in place of those of the recipe.")
    as_json: Annotated[bool, Place("--json")] = Field(
        False,
        description="Print one JSON object in place of the path of the best recipe: the path, and the content of trials.json.",
    )

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.trials is None and self.minutes is None and self.sampler != "grid":
            raise ValueError("nothing ends the search; give --trials, --minutes or both")
        return self
