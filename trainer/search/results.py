"""The files that a search writes for its users: the recipe of the best trial, all trials for programs, and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from common.errors import ProjectError
from common.files import plain, write_atomic
from common.settings.toml import to_toml
from data_pipeline.dataset.manifest import Manifest
from trainer.runs.saved_run import load_config
from trainer.search.report import render_search
from trainer.search.setup import SearchSetup, trial_config
from trainer.search.trial_run import recipe_of
from trainer.search.trials import Trial, best_of
from trainer.verification.data_check import recipe_of as recipe_of_data

__all__ = ["BEST", "REPORT", "TRIALS", "best_recipe", "write_results"]

BEST, REPORT, TRIALS = "best.toml", "report.html", "trials.json"
"""Names of the files in the folder of a search."""
_BUILTIN = {"stdlib-code", "stdlib-manual"}


def write_results(setup: SearchSetup, trials: Sequence[Trial], seconds: float) -> dict[str, Any]:
    """Write all files. Each one is replaced atomically. Returns the content of `trials.json`."""
    best = best_of(trials)
    if best is not None:
        write_atomic(setup.directory / BEST, best_recipe(setup, best).encode())
    write_atomic(setup.directory / REPORT, render_search(setup, trials, seconds).encode())
    facts = {"best": None if best is None else best.number, "seconds": round(seconds, 3)}
    listed: dict[str, Any] = plain(facts | {"trials": [trial.to_json() for trial in trials]})
    write_atomic(setup.directory / TRIALS, (json.dumps(listed, ensure_ascii=False, indent=1) + "\n").encode())
    return listed


def best_recipe(setup: SearchSetup, best: Trial) -> str:
    """Return a complete recipe: the settings of a trial, the values that its run has chosen for `auto`, and those of its data."""
    run = setup.runs.absolute() / best.name
    config = trial_config(setup, best.values, run)
    chosen = load_config(run)
    config = config.model_copy(
        update={"precision": chosen.precision, "batch": config.batch.model_copy(update={"micro": chosen.batch.micro})}
    )
    lines = [
        f"# The settings of {best.name}, with the lowest validation loss of its search: {best.loss!r} nats per token.",
        "# To train it again: trainer train --recipe best.toml --run DIR",
        "",
    ]
    prepare = _preparation(setup.manifest)
    return "\n".join(lines) + (to_toml("prepare", prepare) + "\n" if prepare else "") + recipe_of(config)


def _preparation(manifest: Manifest) -> dict[str, Any]:
    """Return the settings of `prepare` that the data was prepared with, without sources outside of this program."""
    if not manifest.config:
        return {}
    try:
        settings = recipe_of_data(manifest, ())
    except (ProjectError, KeyError, TypeError, AttributeError):
        return {}
    settings = {name: value for name, value in settings.items() if name != "source"}
    return ({"sources": ["builtin"]} if set(manifest.sources) <= _BUILTIN else {}) | settings
