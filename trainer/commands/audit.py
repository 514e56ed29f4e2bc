from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from common.errors import ProjectError
from common.settings.model import Place
from trainer.commands.run_options import RunOptions


class AuditOptions(RunOptions):
    """Proves which rows every step was trained on. Exits with 3 if the data is wrong, with 4 if the run is wrong."""

    step: Annotated[int | None, Place(metavar="N")] = Field(None, description="Print the text of this step instead.")
    full: bool = Field(False, description="Print the whole text of --step.")
    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Directory of the prepared data. Without it, the directory that the run has used."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")

    @model_validator(mode="after")
    def _check_full(self) -> Self:
        if self.full and self.step is None:
            raise ValueError("--full shows the whole text of --step; add --step N, or leave out --full")
        return self


def run(options: AuditOptions) -> None:
    from trainer.verification.audit import audit_run, show_step

    if options.step is not None:
        print(show_step(options.run, options.step, data=options.data, full=options.full, as_json=options.as_json))
        return
    try:
        report = audit_run(options.run, options.data)
    except ProjectError as error:
        if options.as_json:
            print(json.dumps({"ok": False, "error": str(error)}, ensure_ascii=False))
        raise
    print(json.dumps({"ok": True, **asdict(report)}, ensure_ascii=False) if options.as_json else report.describe())
