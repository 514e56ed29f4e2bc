"""Options of several commands: the run, its checkpoint, and consent to execute the code of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from common.settings.markers import AlsoCalled
from common.settings.model import Options, Place


class RunOptions(Options):
    run: Annotated[Path, Place(metavar="RUN", positional=True, variable="TRAIN_RUN")] = Field(description="Directory of the run.")

    @model_validator(mode="before")
    @classmethod
    def _check_run(cls, values: Any) -> Any:
        if "run" not in values:
            raise ValueError("no run is named; give its directory, or set TRAIN_RUN")
        return values


class TrustOptions(RunOptions):
    trust_code: Annotated[bool, Place("--trust-code")] = Field(
        False, description="Execute the extension of the run even if you have not trained with it on this machine."
    )


class CheckpointOptions(TrustOptions):
    checkpoint: Annotated[str, AlsoCalled("ckpt")] = Field("latest", description="The checkpoint to use: latest, best, or a step.")
