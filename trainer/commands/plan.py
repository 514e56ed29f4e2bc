from __future__ import annotations

from trainer.config import PlanConfig


def run(config: PlanConfig) -> None:
    """Shows what a training with these settings will do. It measures five steps and writes nothing."""
    from trainer.planning.forecast import plan_lines
    from trainer.training.dry_run import dry_run

    found = dry_run(config)
    ranks = f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"
    place = f"{found.device}, {ranks}, {found.forecast.config.number_format}"
    print("\n".join(plan_lines(found.forecast, place=place, free_bytes=found.free_bytes, step_s=found.step_s)))
