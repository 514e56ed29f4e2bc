"""`plan`: shows what a training will do."""

from __future__ import annotations

from trainer.config import PlanConfig
from trainer.planning.lines import plan_lines
from trainer.training.dry_run import dry_run

__all__ = ["run"]


def run(config: PlanConfig) -> None:
    """Print the plan. Raises the errors of `dry_run`."""
    found = dry_run(config)
    ranks = f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"
    place = f"{found.device}, {ranks}, {found.forecast.config.number_format}"
    print("\n".join(plan_lines(found.forecast, place=place, free_bytes=found.free_bytes, step_s=found.step_s)))
