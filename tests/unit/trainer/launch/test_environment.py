"""What torchrun is told about a node follows from the variables of its scheduler, its GPUs and its cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from trainer.launch.environment import expected_ranks, first_host, may_have_gpu, missing_variables

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


@pytest.mark.parametrize("sign", ["dev/nvidia0", "dev/nvidia12", "dev/dxg", "proc/driver/nvidia"])
def test_each_sign_of_a_gpu_is_seen(sign: str, tmp_path: Path) -> None:
    for other in ("dev/nvidiactl", "proc/driver/rtc"):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).touch()
    assert not may_have_gpu(tmp_path)
    (tmp_path / sign).mkdir()
    assert may_have_gpu(tmp_path)


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
