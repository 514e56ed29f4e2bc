"""The number of ranks on this node and the address of the first node, from the variables of schedulers, the GPUs and the CPU cores.

torchrun reads both from its own PET_* variables. Kubeflow Trainer sets them; the variables of Slurm and SkyPilot are translated
here. A variable that is set is never changed. An empty variable counts as not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from trainer.launch.settings import check_variables

__all__ = ["expected_ranks", "first_host", "may_have_gpu", "missing_variables"]

_SHUTDOWN_S = 60
"""Seconds that ranks have to save: longer than a save takes, and shorter than `stop_grace_period` in docker-compose.yml."""

_SLURM_LIST = re.compile(r"([^][,]*)(?:\[([0-9]++)[^]]*+\])?([^][,]*)")
_NUM_RANKS = re.compile(r"[1-9][0-9]{0,5}")
_SIGNS_OF_A_GPU = ("dev/nvidia[0-9]*", "dev/dxg", "proc/driver/nvidia")


def missing_variables(variables: Mapping[str, str], num_gpus: int | None, num_cores: int) -> dict[str, str]:
    """Return the variables of torchrun and OpenMP that are not set, with their values for this node. Without `num_gpus`, which only
    torch knows, the number of ranks may be missing.
    """
    known = _of_scheduler(variables) | {name: value for name, value in variables.items() if value}
    if "PET_NPROC_PER_NODE" not in known and num_gpus is not None:
        known["PET_NPROC_PER_NODE"] = str(num_gpus) if num_gpus else known.get("CPU_RANKS", "1")
    known.setdefault("PET_SHUTDOWN_TIMEOUT", str(_SHUTDOWN_S))
    num_ranks = known.get("PET_NPROC_PER_NODE", "")
    if _NUM_RANKS.fullmatch(num_ranks):  # torchrun would set 1 thread for each rank, and other cores would be idle
        known.setdefault("OMP_NUM_THREADS", str(max(1, num_cores // int(num_ranks))))
    return {name: value for name, value in known.items() if variables.get(name) != value}


def expected_ranks(variables: Mapping[str, str], num_gpus: int) -> tuple[int, int]:
    """Return the number of ranks on this node, and the number of nodes, with which the launcher would start a training. Raises
    ConfigError for a variable that cannot be used.
    """
    known = {**variables, **missing_variables(variables, num_gpus, len(os.sched_getaffinity(0)))}
    check_variables(known)
    ranks, nodes = known["PET_NPROC_PER_NODE"], known.get("PET_NNODES") or "1"
    return (int(ranks) if ranks.isdecimal() else max(1, num_gpus)), int(nodes.rpartition(":")[2])


def first_host(nodes: str) -> str:
    """Return the first host in a node list of Slurm, such as `a`, `a,b`, `a[01-04,07]` or `a[1-2]-x,b`."""
    found = _SLURM_LIST.match(nodes)
    return "".join(part or "" for part in found.groups()) if found else ""


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Return whether this machine may have a GPU. Only torch knows, but loading it takes seconds. `root` holds `dev` and `proc`."""
    return any(any(root.glob(pattern)) for pattern in _SIGNS_OF_A_GPU)


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
