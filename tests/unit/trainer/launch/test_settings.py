"""What torchrun and OpenMP read from the environment is refused by name where it cannot be meant."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from trainer.launch.settings import check_variables

WRONG = {
    "PET_NNODES": ("0", "x", "-1", "1:", "3:2", "1.5", "٢", "9999999"),
    "PET_NPROC_PER_NODE": ("0", "two", "-1", "1.0", "100000", " 2", "0x2"),
    "PET_NODE_RANK": ("2", "-1", "first"),
    "PET_MASTER_PORT": ("0", "65536", "http"),
    "PET_MAX_RESTARTS": ("-1", "many"),
    "PET_SHUTDOWN_TIMEOUT": ("0", "1.5", "99999999"),
    "PET_MONITOR_INTERVAL": ("0", "-1", "nan", "inf", "often"),
    "OMP_NUM_THREADS": ("abc", "0", "-2", "4,2", ",", "1025"),
}
RIGHT = {
    "PET_NNODES": ("1", "2", "1:4", "02"),
    "PET_NPROC_PER_NODE": ("1", "8", "auto", "cpu", "gpu", ""),
    "PET_NODE_RANK": ("0", "1", ""),
    "PET_MASTER_PORT": ("1", "29400", "65535", ""),
    "PET_MAX_RESTARTS": ("0", "3"),
    "PET_SHUTDOWN_TIMEOUT": ("1", "600"),
    "PET_MONITOR_INTERVAL": ("0.1", "5"),
    "OMP_NUM_THREADS": ("1", "16", ""),
}
TWO_NODES = {"PET_NNODES": "2", "PET_MASTER_ADDR": "first"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_cannot_be_meant_is_refused_with_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = ") as refused:
        check_variables(TWO_NODES | {name: value})
    assert value.strip() in str(refused.value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_a_value_that_torchrun_takes_is_taken(name: str, value: str) -> None:
    check_variables(TWO_NODES | {name: value})


def test_a_number_of_ranks_is_refused_by_the_name_that_the_user_has_set() -> None:
    with pytest.raises(ConfigError, match=r"^CPU_RANKS = two, "):
        check_variables({"CPU_RANKS": "two", "PET_NPROC_PER_NODE": "two"})
    with pytest.raises(ConfigError, match=r"^PET_NPROC_PER_NODE = two, "):
        check_variables({"CPU_RANKS": "2", "PET_NPROC_PER_NODE": "two"})


def test_several_nodes_need_the_address_of_the_first() -> None:
    with pytest.raises(ConfigError, match="set it to the address of the first node"):
        check_variables({"PET_NNODES": "2"})
    check_variables({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "first:29400"})
    check_variables({"PET_NNODES": "1"})
