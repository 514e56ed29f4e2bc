"""Which device a command computes on: the GPUs that torch sees, or the CPU where the machine has none or the user wants it.

A GPU that torch does not see (an old driver, a container without access, a PyTorch without CUDA) is an error: on the CPU the run
would take many times as long, and nothing would say why.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from common.errors import ConfigError

__all__ = ["check_no_gpu_is_hidden", "num_gpus", "signs_of_gpus"]

_DEVICE_NODES = "dev/nvidia[0-9]*"
_KERNEL_MODULE = "proc/driver/nvidia/gpus/*"
_WSL_DEVICE = "dev/dxg"
"""Windows offers it for a GPU of any maker."""
_WSL_LIBRARIES = ("usr/lib/wsl/lib/libcuda.so*", "usr/lib/wsl/drivers/*/libcuda.so*")
_NO_GPU_WANTED = {
    "CUDA_VISIBLE_DEVICES": ("", "-1", "NoDevFiles"),  # the last one is Slurm's, for a job without GPUs
    "NVIDIA_VISIBLE_DEVICES": ("none", "void"),
    "TRAIN_DEVICE": ("cpu",),
}
"""Values of variables with which a user, or a scheduler, chooses the CPU."""


def num_gpus(device: str) -> int:
    """The number of GPUs that a training on this machine can use; 0: it computes on the CPU.

    Args:
        device: the setting `device`: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: the machine has GPUs, or the setting asks for one, and torch sees none.
    """
    if device == "cpu":
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a driver that is too old is said once, by the error below
        if torch.cuda.is_available():
            return torch.cuda.device_count()
    if device == "cuda":
        reason = f"{_reason(os.environ)}.{_hint()}"
        raise ConfigError(f"device = cuda, but torch sees no GPU: {reason} Run `nvidia-smi`, or use --device cpu")
    check_no_gpu_is_hidden()
    return 0


def check_no_gpu_is_hidden(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Refuses to compute on the CPU of a machine with GPUs, unless a variable asks for the CPU. To be called if torch sees no GPU.

    Args:
        environment: the variables of this process.
        root: where `dev`, `proc` and `usr` are.

    Raises:
        ConfigError: there are signs of a GPU; the message gives torch's reason.
    """
    if any(environment.get(name) in values for name, values in _NO_GPU_WANTED.items()):
        return
    if not (signs := signs_of_gpus(root)):
        return
    raise ConfigError(
        f"this machine has a GPU ({signs[0]}), but torch sees none: {_reason(environment)}.{_hint(root)} "
        "To use the CPU instead, set TRAIN_DEVICE=cpu, or give --device cpu to train"
    )


def signs_of_gpus(root: Path = Path("/")) -> list[str]:
    """Paths that only a machine with an NVIDIA GPU has, those of its device nodes first."""
    found = [*sorted(root.glob(_DEVICE_NODES)), *sorted(root.glob(_KERNEL_MODULE))]
    if (device := root / _WSL_DEVICE).exists() and any(any(root.glob(pattern)) for pattern in _WSL_LIBRARIES):
        found.append(device)
    return list(map(str, found))


def _hint(root: Path = Path("/")) -> str:
    """What to do about a container that cannot reach the GPUs of its machine."""
    if any(root.glob(_DEVICE_NODES)) or not any(root.glob(_KERNEL_MODULE)):
        return ""
    return " There is no device node /dev/nvidia0: if this is a container, give it the GPUs (docker run --gpus all)."


def _reason(environment: Mapping[str, str]) -> str:
    """Why torch sees no GPU, in its words."""
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it does not say why"
    except (AssertionError, RuntimeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return reason if visible is None else f"{reason} (CUDA_VISIBLE_DEVICES = {visible})"
