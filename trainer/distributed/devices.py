"""The device that a command computes on: the GPUs that torch sees, or the CPU if there is no GPU or the user chooses the CPU.

A GPU that torch does not see (an old driver, a container without access, a PyTorch without CUDA) is an error. On the CPU the run
would take many times as long without an explanation.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from common.errors import ConfigError
from common.hardware import DEVICE_NODES, KERNEL_MODULE, signs_of_gpus

_NO_GPU_WANTED = {
    "CUDA_VISIBLE_DEVICES": ("", "-1", "NoDevFiles"),  # Slurm sets NoDevFiles for a job without GPUs
    "NVIDIA_VISIBLE_DEVICES": ("none", "void"),
    "TRAIN_DEVICE": ("cpu",),
}
"""Values of environment variables with which a user or a scheduler chooses the CPU."""


def num_gpus(device: str) -> int:
    """Return the number of GPUs that a run can use; 0: it computes on the CPU. Raises ConfigError if a GPU is hidden from torch."""
    if device == "cpu":
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the error below reports a driver that is too old
        if torch.cuda.is_available():
            return torch.cuda.device_count()
    if device == "cuda":
        raise ConfigError(f"device = cuda, but torch sees no GPU: {_reason(os.environ)} Run `nvidia-smi`, or use --device cpu")
    check_no_gpu_is_hidden()
    return 0


def check_no_gpu_is_hidden(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Refuse to compute on the CPU of a machine with GPUs, unless a variable chooses it. `root` holds `dev`, `proc` and `usr`."""
    if any(environment.get(name) in values for name, values in _NO_GPU_WANTED.items()):
        return
    if not (signs := signs_of_gpus(root)):
        return
    raise ConfigError(
        f"this machine has a GPU ({signs[0]}), but torch sees none: {_reason(environment, root)} "
        "To use the CPU instead, set TRAIN_DEVICE=cpu, or give --device cpu to train"
    )


def _reason(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        reason = f"this PyTorch ({torch.__version__}) is built without CUDA"
    else:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            reason = "torch gives no reason"
        except (AssertionError, RuntimeError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
        if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            reason = f"{reason} (CUDA_VISIBLE_DEVICES = {visible})"
    if any(root.glob(DEVICE_NODES)) or not any(root.glob(KERNEL_MODULE)):
        return f"{reason}."
    return f"{reason}. There is no device node /dev/nvidia0: if this is a container, give it the GPUs (docker run --gpus all)."
