"""Adapters for RDMA between nodes: planted folders of the kernel, and libraries that can or cannot be loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from trainer.doctor.check import Check, Severity
from trainer.doctor.network import check_rdma


def row(root: Path, num_nodes: int = 2, num_gpus: int = 8, **variables: str) -> Check:
    [found] = check_rdma(variables, num_nodes, num_gpus, root)
    return found


def adapter(root: Path, name: str, driver: str) -> None:
    (root / "drivers" / driver).mkdir(parents=True)
    (root / "sys/class/infiniband" / name / "device").mkdir(parents=True)
    (root / "sys/class/infiniband" / name / "device/driver").symlink_to(root / "drivers" / driver)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    present: set[str] = set()

    def load(name: str) -> None:
        if name not in present:
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    return present


def test_adapters_without_their_library_use_tcp(tmp_path: Path, libraries: set[str]) -> None:
    adapter(tmp_path, "mlx5_0", "mlx5_core")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    found = row(tmp_path)
    assert (found.severity, "ibverbs-providers" in found.remedy) == (Severity.WARNING, True)
    assert found.found == "mlx5_0, but libibverbs.so.1 cannot be loaded, so NCCL uses TCP between nodes"
    assert row(tmp_path, num_nodes=1).severity is Severity.NOTE
    libraries.add("libibverbs.so.1")
    assert row(tmp_path).severity is Severity.OK


def test_adapters_of_the_host_that_a_container_did_not_receive_use_tcp(tmp_path: Path, libraries: set[str]) -> None:
    adapter(tmp_path, "mlx5_0", "mlx5_core")
    libraries.add("libibverbs.so.1")
    found = row(tmp_path)
    assert (found.severity, "--device=/dev/infiniband" in found.remedy) == (Severity.WARNING, True)


def test_efa_also_needs_the_plugin_of_nccl(tmp_path: Path, libraries: set[str]) -> None:
    adapter(tmp_path, "rdmap16s27", "efa")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    libraries.add("libibverbs.so.1")
    assert "aws-ofi-nccl" in row(tmp_path).remedy
    libraries.add("libnccl-net.so")
    assert row(tmp_path).severity is Severity.OK


def test_nodes_without_an_adapter_use_tcp(tmp_path: Path) -> None:
    found = row(tmp_path)
    assert (found.severity, found.found) == (
        Severity.NOTE,
        "no adapter (/sys/class/infiniband), so NCCL uses TCP between nodes",
    )
    adapter(tmp_path, "mlx5_0", "mlx5_core")
    assert "NCCL_IB_DISABLE" in row(tmp_path, NCCL_IB_DISABLE="1").found


@pytest.mark.parametrize(("num_nodes", "num_gpus"), [(1, 8), (2, 0), (1, 0)])
def test_a_training_without_rdma_has_no_row(tmp_path: Path, num_nodes: int, num_gpus: int) -> None:
    assert list(check_rdma({}, num_nodes, num_gpus, tmp_path)) == []
