"""The number of ranks that the launcher would start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainer.launch.environment import missing_variables
from trainer.launch.settings import check_variables

__all__ = ["expected_ranks"]


def expected_ranks(variables: Mapping[str, str], num_gpus: int) -> tuple[int, int]:
    """Return the number of ranks on this node, and the number of nodes, with which the launcher would start a training.

    Args:
        variables: of this process.
        num_gpus: number of GPUs that the training uses on this node.

    Raises:
        ConfigError: a variable cannot be used.
    """
    known = {**variables, **missing_variables(variables, lambda: str(num_gpus), len(os.sched_getaffinity(0)))}
    check_variables(known)
    ranks, nodes = known["PET_NPROC_PER_NODE"], known.get("PET_NNODES") or "1"
    return (int(ranks) if ranks.isdecimal() else max(1, num_gpus)), int(nodes.rpartition(":")[2])
