from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.errors import ConfigError
from common.settings.model import Options, Place
from common.text import visible


class RunsOptions(Options):
    """Lists the runs in a folder and in its subfolders, the one that changed last first."""

    folder: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(
        Path("workspace/runs"), description="Folder that holds the runs."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object for each run, one on each line.")


def run(options: RunsOptions) -> None:
    from trainer.report.overview import listed_runs

    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder} is not a folder; name the folder that holds your runs")
    runs = listed_runs(options.folder)
    if not runs:
        raise ConfigError(f"{options.folder} holds no run; `trainer train --run {options.folder}/NAME` starts one")
    if options.as_json:
        for listed in runs:
            print(json.dumps(listed.to_json()))
        return
    width = max(len("run"), *(len(visible(listed.name)) for listed in runs))
    print(f"{'run':<{width}}  {'state':<9} {'steps':>9}  {'validation loss':>15}  last change")
    for listed in runs:
        loss = "-" if listed.val_loss is None else f"{listed.val_loss:.4f}"
        changed = f"{listed.changed:%Y-%m-%d %H:%M}"
        print(f"{visible(listed.name):<{width}}  {listed.state:<9} {listed.step:>9,}  {loss:>15}  {changed}")
