"""The page about one run. `run_page.jinja` holds the words and the tables."""

from __future__ import annotations

import shlex

from common.html.page import render_page
from trainer.report import results
from trainer.report.charts import group_charts, layer_charts, main_charts, speed_charts
from trainer.report.differences import differences, flat, recipe_of, worded
from trainer.report.page import TEMPLATES
from trainer.report.recorded_run import RecordedRun, part

__all__ = ["render_report"]

_MAX_ALERTS = 200


def render_report(run: RecordedRun) -> str:
    """The page about one run."""
    recipe = recipe_of(run.config)
    return render_page(
        TEMPLATES,
        "run_page.jinja",
        script=True,
        title=run.name,
        introduction=results.introduction(run),
        run=run,
        headline=results.headline(run),
        charts=[*main_charts(run), *speed_charts(run), *group_charts(run), *layer_charts(run)],
        alert_kinds=results.alert_kinds(run),
        max_alerts=_MAX_ALERTS,
        evaluations=results.evaluations(run),
        groups_by=results.groups_by(run),
        samples=results.samples(run),
        scores=results.scores(run),
        speed=results.speed(run),
        hardware=results.hardware(run),
        validation_losses={event.step: event.val_loss for event in run.evaluations},
        recipe=recipe,
        changes=differences(run.config, recipe),
        all_settings=sorted((name, worded(value)) for name, value in flat(run.config).items()),
        commands=_commands(run),
    )


def _commands(run: RecordedRun) -> list[tuple[str, str]]:
    """How to check the run, and how to make it again."""
    path, data = shlex.quote(str(run.path)), shlex.quote(str(run.config.get("data", "DATA")))
    ranks = int(part(run.record, "environment").get("world_size", 1))
    launch = "python -m trainer train" if ranks == 1 else f"PET_NPROC_PER_NODE={ranks} entrypoints/train"
    lines = {
        "every digest: record, checkpoints, metrics, ledger, data": f"python -m trainer verify {path} --level integrity",
        "train ten steps again and compare all bits": f"python -m trainer verify {path} --replay 10",
        "what every step was trained on": f"python -m trainer audit {path}",
        "the same run from its first step on, into a directory of its own": (
            f"{launch} --recipe {path}/config.toml --data {data} --run {path}-again"
        ),
    }
    return list(lines.items())
