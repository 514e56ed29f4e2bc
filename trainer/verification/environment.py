"""Compares this machine and its software with those of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from common.errors import ConfigError
from trainer.config import TrainConfig
from trainer.distributed.group import joined_group
from trainer.machine.determinism import configure_determinism, device_name, flags, not_compared, settings_here, threads_per_rank
from trainer.machine.environment import ChangedFact, find_differences, same_facts
from trainer.model.attention import backend_of
from trainer.runs.saved_run import SavedRun


def compare_environment(run: SavedRun, facts: Mapping[str, Any]) -> tuple[ChangedFact, ...]:
    record, config = run.record, run.config
    here = settings_here(config)
    with suppress(ConfigError):  # the settings that it refuses appear among the flags below
        configure_determinism(here)
    identity = record.identity
    recorded, found = same_facts(record.environment.to_json(), facts)
    recorded |= {name: identity.get(name) for name in ("device", "threads", "attention")}
    decided = [name for name in identity if name == "nodes" or name.startswith("flags.")]
    recorded |= {name: identity[name] for name in decided}
    found |= _machine(config) | {f"flags.{name}": value for name, value in flags().items()}
    found |= {"nodes": 1} if "nodes" in identity else {}
    recorded.pop("world_size", None)  # a replay uses the same number
    without_effect = not_compared(identity, found | {name: identity.get(name) for name in ("reproducibility", "world_size")})
    differences = find_differences(recorded, found)
    return tuple(replace(one, changes_bits=one.changes_bits and one.name not in without_effect) for one in differences)


def _machine(config: TrainConfig) -> dict[str, Any]:
    try:
        with joined_group(config.device) as group:
            backend = backend_of(config, group.device)
            return {"device": device_name(group.device), "threads": threads_per_rank(config), "attention": backend}
    except ConfigError as error:
        return {"device": str(error), "threads": threads_per_rank(config), "attention": None}
