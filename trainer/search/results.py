"""The files that a search writes for its users: the recipe of the best trial, all trials for programs, and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import ProjectError
from common.files import write_atomic
from common.html.chart import WIDE, Chart, Line, measured
from common.html.curves import Curve
from common.html.line_chart import draw
from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from common.html.parallel_lines import Coordinate, Rank, Record, draw_parallel
from common.settings.toml import to_toml
from common.text import duration
from data_pipeline.dataset.manifest import Manifest
from trainer.runs.saved_run import load_config
from trainer.search.setup import SearchSetup, trial_config
from trainer.search.space import Choices, Dimension
from trainer.search.study import importance_of
from trainer.search.trial_run import recipe_of
from trainer.search.trials import Trial, best_of, shown
from trainer.verification.data_check import recipe_of as recipe_of_data

BEST, TRIALS = "best.toml", "trials.json"
_MOST_CURVES, _MOST_LINES, _MOST_TICKS = 7, 400, 8

_TEMPLATES = template_environment(
    Path(__file__).parent, decimal=or_unknown(measured), duration=duration, percent=lambda share: f"{100 * share:.0f} %"
)
_TEMPLATES.globals.update(draw=draw)
_BUILTIN = {"stdlib-code", "stdlib-manual"}


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
    chosen = load_config(run)
    config = config.model_copy(
        update={
            "precision": chosen.precision,
            "batch": config.batch.model_copy(update={"micro_batch_size": chosen.batch.micro_batch_size}),
        }
    )
    prepare = _preparation(setup.manifest)
    return (
        f"# The settings of {best.name}, with the lowest validation loss of its search: {best.loss!r} nats per token.\n"
        "# To train it again: trainer train --recipe best.toml --run DIR\n"
    ) + "\n".join([*([to_toml("prepare", prepare)] if prepare else []), recipe_of(config)])


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
        curves=_curves(trials),
        parallel=_parallel(setup, trials, best),
        importance=importance_of(setup.space, trials),
        best=[] if best is None else [(name, shown(best.values[name])) for name in names],
        facts=[
            *((f"space: {name}", _described(one)) for name, one in setup.space.dimensions.items()),
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


def _curves(trials: Sequence[Trial]) -> Chart:
    known = sorted((trial for trial in trials if trial.losses and trial.loss is not None), key=lambda trial: trial.loss or 0.0)
    lines = (
        Line(trial.name, Curve.of(trial.losses.items()), look=look, points=True) for look, trial in enumerate(known[:_MOST_CURVES])
    )
    return Chart(
        f"Validation loss of the best {min(len(known), _MOST_CURVES)} trials", "nats per token", tuple(lines), log_from=WIDE
    )


def _parallel(setup: SearchSetup, trials: Sequence[Trial], best: Trial | None) -> Any:
    known = sorted((trial for trial in trials if trial.loss is not None), key=lambda trial: trial.loss or 0.0)[:_MOST_LINES]
    if best is None:
        return ""
    losses = [trial.loss or 0.0 for trial in known]
    good = max(1, len(known) // 4)
    records = []
    for place, trial in enumerate(known):
        rank: Rank = "best" if trial.number == best.number else "good" if place < good else "other"
        words = ", ".join(f"{name} {shown(value)}" for name, value in trial.values.items())
        records.append(
            Record({**trial.values, "loss": trial.loss}, f"{trial.name}: loss {measured(trial.loss or 0.0)}, {words}", rank)
        )
    axes = [_coordinate(name, dimension) for name, dimension in setup.space.dimensions.items()]
    return draw_parallel("Values of the trials and their loss", [*axes, Coordinate("loss", (), min(losses), max(losses))], records)


def _coordinate(name: str, dimension: Dimension) -> Coordinate:
    if isinstance(dimension, Choices):
        return Coordinate(name, dimension.values)
    if dimension.whole and (dimension.size or _MOST_TICKS + 1) <= _MOST_TICKS:
        return Coordinate(name, dimension.grid())
    return Coordinate(name, (), dimension.low, dimension.high, dimension.log)


def _described(dimension: Dimension) -> str:
    if isinstance(dimension, Choices):
        return ", ".join(map(shown, dimension.values))
    step = "" if dimension.step is None else f" in steps of {shown(dimension.step)}"
    return f"{shown(dimension.low)} to {shown(dimension.high)}{', logarithmic' if dimension.log else ''}{step}"
