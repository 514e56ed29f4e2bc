"""The device of a command on a machine with GPUs that torch does not see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.hardware import signs_of_gpus
from trainer.distributed import devices
from trainer.distributed.devices import check_no_gpu_is_hidden, num_gpus

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


def machine(root: Path, *paths: str) -> Path:
    """Return a root folder with these files, such as those in /dev and /proc."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


@pytest.fixture
def _torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)  # NVML counts GPUs even if the driver is too old for CUDA
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TRAIN_DEVICE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("paths", "signs"),
    [
        (("dev/null", "dev/nvidiactl", "proc/driver/nvidia/version"), 0),
        (("dev/nvidia1", "dev/nvidia0", "proc/driver/nvidia/gpus/0000:01:00.0/information"), 3),
        (("proc/driver/nvidia/gpus/0000:01:00.0/information",), 1),
        (("dev/dxg",), 0),
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), 1),
        (("dev/dxg", "usr/lib/wsl/drivers/nv_dispi/libcuda.so.1.1"), 1),
    ],
    ids=["none", "device nodes", "kernel module", "WSL with another GPU", "WSL", "WSL in a container"],
)
def test_a_gpu_is_known_by_its_device_node_the_kernel_module_or_wsl_with_nvidias_library(
    tmp_path: Path, paths: tuple[str, ...], signs: int
) -> None:
    found = signs_of_gpus(machine(tmp_path, *paths))
    assert len(found) == signs
    if "dev/nvidia0" in paths:
        assert found[0] == str(tmp_path / "dev/nvidia0")


@pytest.mark.usefixtures("_torch_sees_none")
def test_gpus_that_torch_does_not_see_are_refused_with_its_reason(tmp_path: Path) -> None:
    root = machine(tmp_path, "dev/nvidia0")
    with pytest.raises(ConfigError) as refused:
        check_no_gpu_is_hidden({}, root)
    assert str(refused.value) == (
        f"this machine has a GPU ({root}/dev/nvidia0), but torch sees none: "
        "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver. "
        "To use the CPU instead, set TRAIN_DEVICE=cpu, or give --device cpu to train"
    )
    with pytest.raises(ConfigError, match=r"GPU driver \(CUDA_VISIBLE_DEVICES = 7\)\."):
        check_no_gpu_is_hidden({"CUDA_VISIBLE_DEVICES": "7"}, root)


@pytest.mark.usefixtures("_torch_sees_none")
def test_a_container_that_was_given_no_gpu_is_told_how_to_get_one(tmp_path: Path) -> None:
    root = machine(tmp_path, "proc/driver/nvidia/gpus/0000:01:00.0/information")
    with pytest.raises(ConfigError, match=r"There is no device node /dev/nvidia0: .* \(docker run --gpus all\)"):
        check_no_gpu_is_hidden({}, root)


@pytest.mark.parametrize(
    "variable",
    [
        ("CUDA_VISIBLE_DEVICES", ""),
        ("CUDA_VISIBLE_DEVICES", "-1"),
        ("CUDA_VISIBLE_DEVICES", "NoDevFiles"),
        ("NVIDIA_VISIBLE_DEVICES", "void"),
        ("TRAIN_DEVICE", "cpu"),
    ],
    ids="=".join,
)
@pytest.mark.usefixtures("_torch_sees_none")
def test_whoever_hides_the_gpus_or_names_the_cpu_gets_the_cpu(tmp_path: Path, variable: tuple[str, str]) -> None:
    check_no_gpu_is_hidden(dict([variable]), machine(tmp_path, "dev/nvidia0"))


@pytest.mark.usefixtures("_torch_sees_none")
def test_a_machine_without_gpus_needs_no_setting(tmp_path: Path) -> None:
    check_no_gpu_is_hidden({}, machine(tmp_path, "dev/null"))


@pytest.mark.usefixtures("_torch_sees_none")
def test_the_setting_decides_and_gpus_that_cuda_cannot_use_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "signs_of_gpus", lambda _root: ["/dev/nvidia0"])
    assert num_gpus("cpu") == 0
    with pytest.raises(ConfigError, match="this machine has a GPU"):
        num_gpus("auto")
    with pytest.raises(ConfigError, match="device = cuda, but torch sees no GPU: The NVIDIA driver on your system is too old"):
        num_gpus("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (num_gpus("cpu"), num_gpus("auto"), num_gpus("cuda")) == (0, 8, 8)
