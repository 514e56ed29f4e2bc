"""The identity of a run: all that its bits depend on. A run is resumed only if its identity is the same."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from pydantic_core import to_jsonable_python

from common.errors import ConfigError
from common.settings.dotted import flatten
from common.settings.markers import Effect, FixesShapes
from common.settings.model import all_settings, is_among, markers_of, settings_with
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.extensions.files import Digests
from trainer.machine.determinism import device_name, flags, not_compared, threads_per_rank
from trainer.machine.environment import ChangedFact, find_differences, nccl_version, shown
from trainer.model.forward import own_kernels
from trainer.runs.adjustments import Adjustments
from trainer.runs.record import Record, noted_adjustments

_IDENTITY = settings_with(TrainConfig, Effect.IDENTITY)
_OWN = {"kernels": ("precision", "compile", "parallel", "device"), "optimizer": ("optim.kind",)}
"""Facts about this project's own code, which older versions did not record, and the facts that they follow from."""
_OLDER_DEFAULTS = {"guard.spike_factor": 10.0}  # a run with the older default resumes with the new one


def identity_of(
    context: RunContext, *, decay_steps: int, extension: Digests | None, digests: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return all that the bits of a run depend on, flat: `{"optim.lr": 0.001, "data": "sha256:…", …}`, with further `digests`."""
    config, group = context.config, context.group
    settings = flatten(config.model_dump(mode="json"))
    identity = {name: value for name, value in settings.items() if is_among(name, _IDENTITY)}
    identity |= flatten({"flags": flags()}) | {
        "schedule.decay_steps": decay_steps,
        "data": context.manifest.root_digest,
        "attention": context.backend,
        "extension": extension,
        "threads": threads_per_rank(config),
        "device": device_name(group.device),
        "torch": torch.__version__,
        "nodes": group.num_nodes,
        "nccl": nccl_version() if group.device.type == "cuda" else None,
        **digests,
    }
    own = {"kernels": own_kernels(config, group.device), "optimizer": config.optim.optimizer.bits}
    identity |= {name: value for name, value in own.items() if value is not None}
    return identity if config.reproducibility == "elastic" else identity | {"world_size": group.world_size}


def check_data(run: Path, recorded: Mapping[str, Any], root_digest: str | None) -> None:
    """Raise ConfigError if the recorded identity of a run names other data."""
    if recorded.get("data") != root_digest:
        raise ConfigError(
            f"{run}: this run was trained on the data {recorded.get('data')}, not on {root_digest}; "
            "use another --run, or --data with the data that it was trained on"
        )


def check_identity(run: Path, recorded: Mapping[str, Any], identity: Mapping[str, Any], allow_changes: tuple[str, ...]) -> None:
    """Check that the identity of this start equals the recorded identity, except for the allowed changes."""
    check_data(run, recorded, identity.get("data"))
    changed = _differing(recorded, identity)
    refused = [one for one in changed if one.name not in allow_changes]
    names = [one.name for one in refused]
    allow = f"--resume.allow_changes {' '.join([*allow_changes, *names])}"
    if names == ["world_size"]:
        raise ConfigError(
            f"{run}: this run was started on {_ranks(recorded)}, but this start has {_ranks(identity)}, which add gradients in "
            f"another order. Use {recorded.get('world_size')} again. To resume with other results, add {allow}. "
            "A run that is started with --reproducibility elastic has the same bits on 1, 2, 4 or 8 ranks"
        )
    if any(one.name in _OWN and one.recorded is None for one in refused) and {*names} <= {*_OWN, "attention"}:
        raise ConfigError(
            f"{run}: an older version started this run, and this version computes it with other code ({', '.join(names)}), so the "
            f"last bits differ. To resume with other results than those of an uninterrupted run, add {allow}. To keep the bits, "
            "resume with the version in `environment.code` of record.json"
        )
    if names == ["schedule.decay_steps"]:
        raise ConfigError(
            f"{run}: its learning rate was planned to reach its floor at step {refused[0].recorded}, and is planned to do so at "
            f"step {refused[0].found} now. The learning-rate curve changes, so the results differ from those of an uninterrupted "
            f"run of that length. To train on with the new length, add {allow}. To keep the old length, use the old limits"
        )
    if refused:
        before, now = flatten({one.name: one.recorded for one in refused}), flatten({one.name: one.found for one in refused})
        inner = find_differences(before, now)  # an extension may have several files, with a digest for each
        differences = ", ".join(f"{one.name} was {shown(one.recorded)} and is {shown(one.found)}" for one in inner)
        shapes = markers_of(TrainConfig, FixesShapes)
        fixed = [one.name for one in refused if one.name in shapes or (one.name == "ema.decay" and one.recorded is None)]
        remedy = (
            f"The weights, optimizer state or average in its checkpoints do not fit another value of {' or '.join(fixed)}"
            if fixed
            else f"To resume with other results than those of an uninterrupted run, add {allow}"
        )
        raise ConfigError(
            f"{run}: this run was started with another configuration: {differences}. Use another --run, or the old values. {remedy}"
        )


def _differing(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> list[ChangedFact]:
    skipped = not_compared(recorded, identity)
    if all(one.get(f"guard.{rule}") == "log" for one in (recorded, identity) for rule in ("spike", "drop")):
        skipped |= {"guard.spike_factor", "guard.spike_floor"}  # they change no bit while spikes and drops are only logged
    for name, decisive in _OWN.items():  # it is enough to refuse or allow the cause
        if any(recorded.get(one) != identity.get(one) for one in decisive):
            skipped |= {name}
    skipped |= {
        name
        for name, value in _OLDER_DEFAULTS.items()
        if recorded.get(name) == value and identity.get(name) == _default_settings()[name]
    }
    return [one for one in find_differences(with_newer_settings(recorded, identity), identity) if one.name not in skipped]


def with_newer_settings(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded identity with the defaults of those settings of `identity` that did not exist when it was recorded."""
    newer = identity.keys() - recorded.keys()
    return {name: value for name, value in _default_settings().items() if name in newer} | dict(recorded)


@cache
def _default_settings() -> dict[str, Any]:
    defaults = {
        name: field.get_default(call_default_factory=True) for name, field in all_settings(TrainConfig) if name in _IDENTITY
    }
    return flatten(to_jsonable_python(defaults))


def _ranks(identity: Mapping[str, Any]) -> str:
    number = identity.get("world_size")
    return f"{number} rank{'s' * (number != 1)}"


def recorded_adjustments(
    run: Path, record: Record | None, identity: Mapping[str, Any], allow_changes: tuple[str, ...]
) -> Adjustments:
    """Return the adjustments of earlier starts without those that allowed changes drop; none if the identity differs otherwise."""
    if record is None or any(one.name not in allow_changes for one in _differing(record.identity, identity)):
        return Adjustments()
    adjustments = record.adjustments.plus(*noted_adjustments(run))
    names = {"micro": "batch.micro_batch_size", "quarantine": "quarantine", "cooldown": "cooldown"}
    return adjustments.of(kind for kind, name in names.items() if name not in allow_changes)
