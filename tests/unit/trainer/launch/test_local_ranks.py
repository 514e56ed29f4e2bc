"""`plan` expects as many ranks as the launcher would start."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from trainer.launch.local_ranks import expected_ranks


@pytest.mark.parametrize(
    ("variables", "num_gpus", "expected"),
    [
        ({}, 0, (1, 1)),
        ({}, 4, (4, 1)),
        ({"CPU_RANKS": "3"}, 0, (3, 1)),
        ({"CPU_RANKS": "3"}, 2, (2, 1)),
        ({"PET_NPROC_PER_NODE": "auto"}, 2, (2, 1)),
        ({"PET_NPROC_PER_NODE": "gpu"}, 0, (1, 1)),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "8"}, 8, (8, 2)),
        ({"PET_NNODES": "1:4", "PET_MASTER_ADDR": "a"}, 1, (1, 4)),
    ],
)
def test_the_ranks_follow_from_variables_and_gpus(variables: dict[str, str], num_gpus: int, expected: tuple[int, int]) -> None:
    assert expected_ranks(variables, num_gpus) == expected


def test_a_wrong_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="CPU_RANKS = many"):
        expected_ranks({"CPU_RANKS": "many"}, 0)
