"""What torchrun is told about a node follows from the variables of its scheduler, its GPUs and its cores."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from trainer.launch.environment import check_variables, expected_ranks, first_host, missing_variables

SLURM = {"SLURM_JOB_NODELIST": "gpu[03-04,09]", "SLURM_NNODES": "3", "SLURM_NODEID": "1"}
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
ONE_NODE = {"PET_SHUTDOWN_TIMEOUT": "60"}


def missing(variables: dict[str, str], gpus: int = 0, cores: int = 6) -> dict[str, str]:
    return missing_variables(variables, gpus, cores)


def test_one_machine_without_gpus_starts_one_rank_on_all_cores_unless_a_variable_says_more() -> None:
    assert missing({}) == ONE_NODE | {"PET_NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "6"}
    assert missing({"CPU_RANKS": "2"}) == ONE_NODE | {"PET_NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "3"}
    assert missing({"CPU_RANKS": "", "PET_NPROC_PER_NODE": ""})["PET_NPROC_PER_NODE"] == "1"


def test_there_is_one_rank_for_each_gpu() -> None:
    assert missing({"CPU_RANKS": "2"}, gpus=4, cores=16) == ONE_NODE | {"PET_NPROC_PER_NODE": "4", "OMP_NUM_THREADS": "4"}


def test_the_number_of_ranks_is_left_open_until_the_gpus_are_counted() -> None:
    assert missing_variables({"CPU_RANKS": "2"}, None, 6) == ONE_NODE
    assert missing_variables({"PET_NPROC_PER_NODE": "2"}, None, 6)["OMP_NUM_THREADS"] == "3"


def test_every_rank_has_a_thread_however_many_ranks_there_are() -> None:
    assert missing({"PET_NPROC_PER_NODE": "7"})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("num_ranks", ["auto", "0", "-1", "two", "1234567"])
def test_nothing_follows_from_a_number_of_ranks_that_is_none(num_ranks: str) -> None:
    assert missing({"PET_NPROC_PER_NODE": num_ranks}) == ONE_NODE


def test_slurm_is_translated() -> None:
    found = missing(SLURM)
    assert (found["PET_NNODES"], found["PET_NODE_RANK"], found["PET_MASTER_ADDR"]) == ("3", "1", "gpu03")
    assert missing(SLURM | {"SLURM_STEP_NUM_NODES": "2"})["PET_NNODES"] == "2"
    alone = missing({"SLURM_JOB_NODELIST": "gpu03"})
    assert alone["PET_NNODES"] == "1"
    assert "PET_MASTER_ADDR" not in alone
    assert "PET_MASTER_ADDR" not in missing(SLURM | {"PET_NNODES": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-2],m7", "n1"), ("n[07,09]-ib", "n07-ib"), ("rack1-node[001-128]", "rack1-node001")],
)
def test_the_first_host_of_slurms_list_is_the_master(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_skypilot_is_translated() -> None:
    found = missing(SKYPILOT)
    assert (found["PET_NNODES"], found["PET_NODE_RANK"], found["PET_MASTER_ADDR"]) == ("2", "1", "10.0.0.4")
    assert found["PET_NPROC_PER_NODE"] == "8"
    assert "PET_MASTER_ADDR" not in missing(SKYPILOT | {"SKYPILOT_NUM_NODES": "1"})


def test_a_node_of_skypilot_without_gpus_starts_its_cpu_ranks() -> None:
    assert missing(SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0", "CPU_RANKS": "2"})["PET_NPROC_PER_NODE"] == "2"


def test_a_scheduler_that_says_only_a_part_is_no_error() -> None:
    assert missing({"SKYPILOT_NUM_NODES": "2"})["PET_NNODES"] == "2"


@pytest.mark.parametrize("scheduler", [{}, SLURM, SKYPILOT], ids=["none", "slurm", "skypilot"])
def test_a_variable_that_is_set_is_never_changed(scheduler: dict[str, str]) -> None:
    own = {
        "PET_NNODES": "5",
        "PET_NODE_RANK": "4",
        "PET_MASTER_ADDR": "kubeflow-0",
        "PET_NPROC_PER_NODE": "3",
        "PET_SHUTDOWN_TIMEOUT": "9",
        "OMP_NUM_THREADS": "7",
    }
    assert missing(scheduler | own) == {}


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
def test_plan_expects_the_ranks_of_the_launcher(variables: dict[str, str], num_gpus: int, expected: tuple[int, int]) -> None:
    assert expected_ranks(variables, num_gpus) == expected


def test_no_ranks_are_expected_with_a_wrong_variable() -> None:
    with pytest.raises(ConfigError, match="CPU_RANKS = many"):
        expected_ranks({"CPU_RANKS": "many"}, 0)


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
