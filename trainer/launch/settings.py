"""Checks the variables for the number of ranks and the address of the first node, before torch is loaded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping

from common.errors import ConfigError

__all__ = ["check_variables", "openmp_threads"]

_KINDS_OF_RANKS = ("auto", "cpu", "gpu", "xpu")
_RANKS_PER_CORE = 16
_LEAST_MAX_RANKS = 64
_LAST_PORT = 65535
_LONG_S = 7 * 24 * 3600
_MANY = 10**6


def check_variables(variables: Mapping[str, str]) -> None:
    """Check the variables that torchrun and OpenMP read. An empty variable counts as not set. Raises ConfigError."""
    num_nodes = _num_nodes(variables.get("PET_NNODES") or "1")
    _check_ranks(variables)
    _check_number(variables, "PET_NODE_RANK", 0, num_nodes - 1, "the number of this node, from 0")
    _check_number(variables, "PET_MASTER_PORT", 1, _LAST_PORT, "the port at which the nodes meet")
    _check_number(variables, "PET_MAX_RESTARTS", 0, _MANY, "how often torchrun itself starts ranks again")
    _check_number(variables, "PET_SHUTDOWN_TIMEOUT", 1, _LONG_S, "seconds that ranks have to save when they are asked to stop")
    interval = variables.get("PET_MONITOR_INTERVAL") or "1"
    try:
        seconds = float(interval)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONG_S:
        raise ConfigError(f"PET_MONITOR_INTERVAL = {interval} must be a number of seconds, more than 0 and at most {_LONG_S}")
    openmp_threads(variables)
    if num_nodes > 1 and not (variables.get("PET_MASTER_ADDR") or variables.get("PET_RDZV_ENDPOINT")):
        raise ConfigError(
            f"PET_NNODES = {variables.get('PET_NNODES')}, but PET_MASTER_ADDR is not set; set it to the address of the first node"
        )


def openmp_threads(variables: Mapping[str, str]) -> int | None:
    """Return OMP_NUM_THREADS; None if it is not set. Raises ConfigError for a value that cannot be used."""
    _check_number(variables, "OMP_NUM_THREADS", 1, 1024, "CPU threads of one rank")
    return int(variables.get("OMP_NUM_THREADS") or 0) or None


def _num_nodes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"PET_NNODES = {text} must be a number of nodes, 1 or more, or MIN:MAX")
    return most


def _check_ranks(variables: Mapping[str, str]) -> None:
    text = variables.get("PET_NPROC_PER_NODE") or "1"
    if text in _KINDS_OF_RANKS:
        return
    name = "CPU_RANKS" if text == variables.get("CPU_RANKS") else "PET_NPROC_PER_NODE"
    most = max(_LEAST_MAX_RANKS, _RANKS_PER_CORE * (os.cpu_count() or 1))
    _number(name, text, 1, most, "the number of ranks on this node")


def _check_number(variables: Mapping[str, str], name: str, least: int, most: int, meaning: str) -> None:
    if text := variables.get(name):
        _number(name, text, least, most, meaning)


def _number(name: str, text: str, least: int, most: int, meaning: str) -> None:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not least <= int(text) <= most:
        raise ConfigError(f"{name} = {text}, {meaning}, must be an integer from {least} to {most}")
