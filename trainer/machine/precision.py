"""The number format of a run with `precision = auto`: the fastest one that all ranks have, and the same after a resume."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from trainer.config import Precision, TrainConfig
from trainer.distributed.group import Group
from trainer.machine.environment import from_cpuinfo

_log = logging.getLogger(__name__)
_LEAST_WIDTH = 256  # narrower models are not clearly faster in bf16 with AMX: see "Precision" in docs/decisions.md


@dataclass(frozen=True)
class ChosenPrecision:
    setting: str  # the value that the user set: `auto` or a format
    value: Precision
    reason: str


def with_precision(config: TrainConfig, group: Group, recorded: Precision | None) -> tuple[TrainConfig, ChosenPrecision]:
    """Return the settings with a number format for `precision = auto`, the same on all ranks. All ranks must call this."""
    device_type = group.device.type
    has_bf16 = device_type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision != "auto":
        if config.precision == "bf16" and device_type == "cuda" and not has_bf16:
            _log.warning(
                "precision = bf16: this GPU has no bf16 (compute capability below 8.0) and emulates it slowly; fp16 is faster"
            )
        return config, ChosenPrecision(config.precision, config.precision, "the settings say so")
    all_fast = bool(group.smallest(has_bf16 if device_type == "cuda" else has_amx()))
    value, reason = choose_precision(device_type, config.model.width, all_fast=all_fast)
    if recorded is not None:
        if device_type != "cuda" or all_fast or recorded != "bf16":
            value, reason = recorded, "the run was started with it"
        elif "precision" not in config.resume.allow_changes:
            raise ConfigError(
                f"{config.run}: this run was started in bf16, and a GPU of this start has no bf16 (compute capability below 8.0). "
                f"To resume in {value} with other results, add --resume.allow_changes device precision"
            )
    _log.info("precision = auto: %s, because %s", value, reason)
    return config.model_copy(update={"precision": value}), ChosenPrecision("auto", value, reason)


def choose_precision(device_type: str, width: int, *, all_fast: bool) -> tuple[Precision, str]:
    """Return the number format of a new run, and the reason. `all_fast`: all ranks have compute capability 8.0, or AMX."""
    if device_type == "cuda":
        return ("bf16", "every GPU has it") if all_fast else ("fp16", "not every GPU has bf16 (compute capability 8.0)")
    if not all_fast:
        return "fp32", "bf16 is slower on CPUs without AMX"
    if width < _LEAST_WIDTH:
        return "fp32", f"bf16 may be slower for model.width below {_LEAST_WIDTH}, even on CPUs with AMX"
    return "bf16", f"it is faster on CPUs with AMX from model.width = {_LEAST_WIDTH} on"


def has_amx() -> bool:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    has_unit = any("amx_bf16" in flags.split() for flags in from_cpuinfo("flags"))
    return has_unit and (limit in ("ALL", "DEFAULT") or "AMX" in limit)
