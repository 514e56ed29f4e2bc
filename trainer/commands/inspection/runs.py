"""`runs`: lists the runs in a folder."""

from __future__ import annotations

import json

from common.errors import ConfigError
from common.text import visible
from trainer.commands.inspection.options.runs import RunsOptions
from trainer.report.overview import ListedRun, listed_runs

__all__ = ["run"]


def run(options: RunsOptions) -> None:
    """Print one line for each run.

    Raises:
        ConfigError: the folder does not exist, or holds no run.
    """
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
        print(_line(listed, width))


def _line(listed: ListedRun, width: int) -> str:
    loss = "-" if listed.val_loss is None else f"{listed.val_loss:.4f}"
    changed = f"{listed.changed:%Y-%m-%d %H:%M}"
    return f"{visible(listed.name):<{width}}  {listed.state:<9} {listed.step:>9,}  {loss:>15}  {changed}"
