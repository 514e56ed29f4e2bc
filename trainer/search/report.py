"""The page about a search: its trials, their history, parallel coordinates, and the importance of the settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.html.chart import WIDE, Chart, Line, measured
from common.html.curves import Curve
from common.html.line_chart import draw
from common.html.page import UNKNOWN, or_unknown, render_page, template_environment
from common.html.parallel_lines import Coordinate, Rank, Record, draw_parallel
from common.text import duration
from trainer.search.setup import SearchSetup
from trainer.search.space import Choices, Dimension
from trainer.search.study import importance_of
from trainer.search.trials import Trial, best_of, shown

__all__ = ["render_search"]

_LOSS = "loss"
_MOST_CURVES, _MOST_LINES, _MOST_TICKS = 7, 400, 8

_TEMPLATES = template_environment(
    Path(__file__).parent, decimal=or_unknown(measured), duration=duration, percent=lambda share: f"{100 * share:.0f} %"
)
_TEMPLATES.globals.update(draw=draw)


def render_search(setup: SearchSetup, trials: Sequence[Trial], seconds: float) -> str:
    """Return the page.

    Args:
        setup: of the search.
        trials: all trials, in order.
        seconds: time that all starts of the search have taken.
    """
    best, names = best_of(trials), list(setup.space.dimensions)
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
    """Return the loss of each trial, and the lowest one so far."""
    finished = [(trial.number, trial.loss) for trial in trials if trial.state == "finished" and trial.loss is not None]
    pruned = [(trial.number, trial.loss) for trial in trials if trial.state == "pruned" and trial.loss is not None]
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
    """Return the validation loss over the steps of the best trials."""
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
            Record({**trial.values, _LOSS: trial.loss}, f"{trial.name}: loss {measured(trial.loss or 0.0)}, {words}", rank)
        )
    axes = [_coordinate(name, dimension) for name, dimension in setup.space.dimensions.items()]
    return draw_parallel("Values of the trials and their loss", [*axes, Coordinate(_LOSS, (), min(losses), max(losses))], records)


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
