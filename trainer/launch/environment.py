"""The number of ranks on this node and the address of the first node, from the variables of schedulers, the GPUs and the CPU cores.

torchrun reads both from its own PET_* variables. Kubeflow Trainer sets them; the variables of Slurm and SkyPilot are translated
here. A variable that is set is never changed. An empty variable counts as not set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from common.errors import ConfigError
from common.hardware import num_cores

SHUTDOWN_S = 60  # to save: longer than a save takes, shorter than `stop_grace_period` in docker-compose.yml

_SLURM_LIST = re.compile(r"([^][,]*)(?:\[([0-9]++)[^]]*+\])?([^][,]*)")
_NUM_RANKS = re.compile(r"[1-9][0-9]{0,5}")
_RANKS_PER_CORE, _LEAST_MAX_RANKS = 16, 64
_LONG_S = 7 * 24 * 3600


def missing_variables(variables: Mapping[str, str], num_gpus: int | None, num_cores: int) -> dict[str, str]:
    """Without `num_gpus`, which only torch knows, the number of ranks may be missing."""
    known = _of_scheduler(variables) | {name: value for name, value in variables.items() if value}
    if "PET_NPROC_PER_NODE" not in known and num_gpus is not None:
        known["PET_NPROC_PER_NODE"] = str(num_gpus) if num_gpus else known.get("CPU_RANKS", "1")
    known.setdefault("PET_SHUTDOWN_TIMEOUT", str(SHUTDOWN_S))
    num_ranks = known.get("PET_NPROC_PER_NODE", "")
    if _NUM_RANKS.fullmatch(num_ranks):  # torchrun would set 1 thread for each rank, and other cores would be idle
        known.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // int(num_ranks))))
    return {name: value for name, value in known.items() if variables.get(name) != value}


def expected_ranks(variables: Mapping[str, str], num_gpus: int) -> tuple[int, int]:
    known = {**variables, **missing_variables(variables, num_gpus, num_cores())}
    check_variables(known)
    ranks, nodes = known["PET_NPROC_PER_NODE"], known.get("PET_NNODES") or "1"
    return (int(ranks) if ranks.isdecimal() else max(1, num_gpus)), int(nodes.rpartition(":")[2])


def first_host(nodes: str) -> str:
    """Return the first host in a node list of Slurm, such as `a`, `a,b`, `a[01-04,07]` or `a[1-2]-x,b`."""
    found = _SLURM_LIST.match(nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def _of_scheduler(variables: Mapping[str, str]) -> dict[str, str]:
    if num_nodes := variables.get("SKYPILOT_NUM_NODES"):
        node_rank = variables.get("SKYPILOT_NODE_RANK", "")
        num_ranks = variables.get("SKYPILOT_NUM_GPUS_PER_NODE", "").removeprefix("0")  # 0: no GPUs, so CPU_RANKS applies
        first = variables.get("SKYPILOT_NODE_IPS", "").partition("\n")[0]
    elif nodes := variables.get("SLURM_JOB_NODELIST"):
        names = ("PET_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        num_nodes = next((value for name in names if (value := variables.get(name))), "1")
        node_rank, num_ranks, first = variables.get("SLURM_NODEID", ""), "", first_host(nodes)
    else:
        return {}
    found = {
        "PET_NNODES": num_nodes,
        "PET_NODE_RANK": node_rank,
        "PET_NPROC_PER_NODE": num_ranks,
        "PET_MASTER_ADDR": "" if num_nodes == "1" else first,
    }
    return {name: value for name, value in found.items() if value}


def check_variables(variables: Mapping[str, str]) -> None:
    nodes, ranks = variables.get("PET_NNODES") or "1", variables.get("PET_NPROC_PER_NODE") or "1"
    found = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes, re.ASCII)
    least, num_nodes = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= num_nodes:
        raise ConfigError(f"PET_NNODES = {nodes} must be a number of nodes, 1 or more, or MIN:MAX")
    if ranks not in ("auto", "cpu", "gpu", "xpu"):
        name = "CPU_RANKS" if ranks == variables.get("CPU_RANKS") else "PET_NPROC_PER_NODE"
        most = max(_LEAST_MAX_RANKS, _RANKS_PER_CORE * num_cores())
        _check_number({name: ranks}, name, 1, most, "the number of ranks on this node")
    _check_number(variables, "PET_NODE_RANK", 0, num_nodes - 1, "the number of this node, from 0")
    _check_number(variables, "PET_MASTER_PORT", 1, 65535, "the port at which the nodes meet")
    _check_number(variables, "PET_MAX_RESTARTS", 0, 10**6, "how often torchrun itself starts ranks again")
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
    _check_number(variables, "OMP_NUM_THREADS", 1, 1024, "CPU threads of one rank")
    return int(variables.get("OMP_NUM_THREADS") or 0) or None


def _check_number(variables: Mapping[str, str], name: str, least: int, most: int, meaning: str) -> None:
    text = variables.get(name)
    if text and (not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or not least <= int(text) <= most):
        raise ConfigError(f"{name} = {text}, {meaning}, must be an integer from {least} to {most}")
