from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.errors import ProjectError
from common.settings.model import Place
from trainer.commands.run_options import TrustOptions
from trainer.runs.layout import RECORD


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


def run(options: VerifyOptions) -> None:
    from trainer.interop.export import EXPORT_RECORD, describe_export, verify_export
    from trainer.loop import train
    from trainer.verification.verify import Outcome, verify_run

    is_export = (options.run / EXPORT_RECORD).exists() and not (options.run / RECORD).exists()
    held: list[dict[str, Any]] = []
    try:
        if options.export is not None or is_export:
            facts = verify_export(options.run) if options.export is None else verify_export(options.export, options.run)
            outcomes = iter([Outcome("export", describe_export(facts), facts)])
        else:
            outcomes = verify_run(
                options.run,
                train=partial(train, trust_extension=False),  # a replay does not count as a training with the extension
                level=options.level,
                num_steps=options.replay,
                start=options.start,
                data=options.data,
                sources=options.sources,
                trust_code=options.trust_code,
            )
        for outcome in outcomes:
            held.append({"level": outcome.level, **outcome.facts})
            if not options.as_json:
                print(outcome.text, flush=True)
    except ProjectError as error:
        if options.as_json:
            print(json.dumps({"ok": False, "held": held, "error": str(error)}, ensure_ascii=False))
        raise
    if options.as_json:
        print(json.dumps({"ok": True, "held": held}, ensure_ascii=False))
