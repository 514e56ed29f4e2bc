"""The files that a search writes for its users: the recipe of the best trial, all trials for programs, and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ProjectError
from common.files import write_atomic
from common.html.chart import WIDE, Chart, Curve, Line, measured
from common.html.drawing import draw
from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from common.settings.dotted import to_toml
from common.text import duration
from trainer.runs.saved_run import SavedRun
from trainer.search.setup import SearchSetup, trial_config
from trainer.search.space import shown
from trainer.search.study import Trial, best_of, importance_of
from trainer.search.trial_run import recipe_of
from trainer.verification.verify import recipe_of as recipe_of_data

BEST, TRIALS = "best.toml", "trials.json"

_TEMPLATES = template_environment(
    Path(__file__).parent, decimal=or_unknown(measured), duration=duration, percent=lambda share: f"{100 * share:.0f} %"
)
_TEMPLATES.globals.update(draw=draw)


def write_results(setup: SearchSetup, trials: Sequence[Trial], seconds: float) -> dict[str, Any]:
    """Write all files. Each one is replaced atomically. Returns the content of `trials.json`."""
    best = best_of(trials)
    if best is not None:
        write_atomic(setup.directory / BEST, best_recipe(setup, best).encode())
    write_atomic(setup.directory / "report.html", _page(setup, trials, best, seconds).encode())
    listed = [trial.to_json() for trial in trials]
    facts = {"best": None if best is None else best.number, "seconds": round(seconds, 3), "trials": listed}
    write_atomic(setup.directory / TRIALS, (json.dumps(facts, ensure_ascii=False, indent=1) + "\n").encode())
    return facts


def best_recipe(setup: SearchSetup, best: Trial) -> str:
    """Return a complete recipe: the settings of a trial, the values that its run has chosen for `auto`, and those of its data."""
    run = setup.runs.absolute() / best.name
    config = trial_config(setup, best.values, run)
    chosen = SavedRun(run).config
    config = config.model_copy(
        update={
            "precision": chosen.precision,
            "batch": config.batch.model_copy(update={"micro_batch_size": chosen.batch.micro_batch_size}),
        }
    )
    prepare: dict[str, Any] = {}  # the settings of the data, without sources outside of this program
    if setup.manifest.config:
        with suppress(ProjectError, KeyError, TypeError, AttributeError):
            found = {name: value for name, value in recipe_of_data(setup.manifest, ()).items() if name != "source"}
            prepare = ({"sources": ["builtin"]} if setup.manifest.is_builtin else {}) | found
    return (
        f"# The settings of {best.name}, with the lowest validation loss of its search: {best.loss!r} nats per token.\n"
        "# To train it again: trainer train --recipe best.toml --run DIR\n"
    ) + "\n".join([*([to_toml("prepare", prepare)] if prepare else []), recipe_of(config)])


def _page(setup: SearchSetup, trials: Sequence[Trial], best: Trial | None, seconds: float) -> str:
    names = list(setup.space.dimensions)
    options = setup.options
    counts = {state: sum(trial.state == state for trial in trials) for state in ("finished", "pruned", "failed", "running")}
    return render_page(
        _TEMPLATES,
        "report.jinja",
        script=True,
        title=f"Search {setup.directory.resolve().name}",
        introduction=f"{len(names)} settings, sampler {options.sampler}, pruner {options.pruner}, seed {options.seed}",
        shown=[
            ("best loss", UNKNOWN if best is None else measured(best.loss or math.nan), "nats per token, validation"),
            ("best trial", UNKNOWN if best is None else best.number, "runs/ has its run"),
            (
                "trials",
                counts["finished"] + counts["pruned"],
                ", ".join(f"{number} {state}" for state, number in counts.items() if number),
            ),
            ("time", duration(seconds), "over all starts"),
        ],
        names=names,
        trials=list(trials),
        values_of=lambda trial: [shown(trial.values[name]) for name in names],
        best_number=None if best is None else best.number,
        history=_history(trials),
        importance=importance_of(setup.space, trials),
        best=[] if best is None else [(name, shown(best.values[name])) for name in names],
        facts=[
            *((f"space: {name}", str(one)) for name, one in setup.space.dimensions.items()),
            ("recipe", options.recipe),
            ("data", setup.manifest.root_digest),
            ("threads of a trial", str(setup.config.threads)),
            ("pruned from step", str(setup.prune_from)),
        ],
    )


def _history(trials: Sequence[Trial]) -> Chart:
    known = [trial for trial in trials if trial.loss is not None]
    finished, pruned = ([(one.number, one.loss or 0.0) for one in known if one.state == state] for state in ("finished", "pruned"))
    lowest = [(number, min(loss for _, loss in finished[: place + 1])) for place, (number, _) in enumerate(finished)]
    return Chart(
        "Lowest validation loss of each trial",
        "nats per token",
        (
            Line("best so far", Curve.of(lowest), look=1),
            Line("finished", Curve.of(finished), look=0, faint=True, points=True),
            Line("pruned", Curve.of(pruned), look=3, faint=True, points=True),
        ),
        along="trial",
        log_from=WIDE,
    )
