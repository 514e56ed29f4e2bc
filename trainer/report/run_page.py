"""The page about one run. `run_page.jinja` has its text and tables."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from common.html.chart import measured
from common.html.line_chart import draw
from common.html.page import or_unknown, render_page, template_environment
from common.text import count, duration, rate, share, size
from common.untrusted import number
from trainer.report import results
from trainer.report.charts import all_charts
from trainer.report.differences import differences, recipe_of, set_values, worded
from trainer.report.recorded_run import RecordedRun, part
from trainer.report.results import STATUS

_MAX_ALERTS = 200


def render_report(run: RecordedRun) -> str:
    recipe = recipe_of(run.config)
    return render_page(
        TEMPLATES,
        "run_page.jinja",
        script=True,
        title=run.name,
        introduction=results.introduction(run),
        run=run,
        headline=results.headline(run),
        charts=all_charts(run),
        alert_kinds=results.alert_kinds(run),
        max_alerts=_MAX_ALERTS,
        evaluations=results.evaluations(run),
        groups_by=results.groups_by(run),
        labels=results.labels(run),
        samples=results.samples(run),
        scores=results.scores(run),
        speed=results.speed(run),
        hardware=results.hardware(run),
        validation_losses={event.step: event.val_loss for event in run.evaluations},
        recipe=recipe,
        changes=differences(run.config, recipe),
        all_settings=sorted((name, worded(value)) for name, value in set_values(run.config).items()),
        commands=_commands(run),
    )


def _commands(run: RecordedRun) -> list[tuple[str, str]]:
    path, data = shlex.quote(str(run.path)), shlex.quote(str(run.config.get("data", "DATA")))
    ranks = run.record.environment.world_size
    launch = "trainer train" if ranks == 1 else f"PET_NPROC_PER_NODE={ranks} entrypoints/train"
    lines = {
        "check all digests: record, checkpoints, metrics, ledger, data": f"trainer verify {path} --level integrity",
        "train ten steps again and compare all bits": f"trainer verify {path} --replay 10",
        "prove the rows of every step": f"trainer audit {path}",
        "repeat the whole run in a new directory": (f"{launch} --recipe {path}/config.toml --data {data} --run {path}-again"),
    }
    return list(lines.items())


def _written(form: Callable[[float], str]) -> Callable[[object], str]:
    return lambda value: or_unknown(form)(number(value))


TEMPLATES = template_environment(
    Path(__file__).parent,
    count=_written(count),
    decimal=_written(measured),
    duration=duration,
    rate=_written(rate),
    share=_written(share),
    size=_written(size),
    status=lambda status: STATUS.get(status, status),
    worded_items=lambda values: [(name, worded(value)) for name, value in values.items()],
)
TEMPLATES.globals.update(draw=draw, part=part)
