"""Checks of PyTorch with the GPUs of this machine. This module loads torch."""

from __future__ import annotations

import itertools

import torch

from common.errors import ConfigError
from trainer.distributed import devices
from trainer.doctor.check import Check, Severity, check

__all__ = ["check_seen_gpus", "has_peer_access", "kernels_for", "seen_gpus"]


def seen_gpus(device: str = "auto") -> tuple[int, str]:
    """Return the number of GPUs that a training would use, and why it would be refused; empty if it would not."""
    try:
        return devices.num_gpus(device), ""
    except ConfigError as error:
        return 0, str(error)


@check("GPUs", "machine")
def check_seen_gpus(num_gpus: int, refusal: str) -> Check:
    if refusal:
        found, _, remedy = refusal.partition(". ")
        return Check("torch", found, Severity.ERROR, "torch sees the GPUs of this machine", remedy or "run nvidia-smi")
    build = f"torch {torch.__version__}, {'no CUDA' if torch.version.cuda is None else f'CUDA {torch.version.cuda}'}"
    if not num_gpus:
        return Check("torch", f"{build}; training uses the CPU")
    built = torch.cuda.get_arch_list()
    missing = [number for number in range(num_gpus) if not kernels_for(torch.cuda.get_device_capability(number), built)]
    if missing:
        capability = ".".join(map(str, torch.cuda.get_device_capability(missing[0])))
        remedy = "use another GPU, or a build of PyTorch with kernels for this one"
        found = f"{build}, without kernels for GPU {missing[0]} (compute capability {capability})"
        return Check("torch", found, Severity.ERROR, f"one of {', '.join(built)}", remedy)
    return Check("torch", f"{build}, {num_gpus} GPU{'s' * (num_gpus > 1)}")


def kernels_for(capability: tuple[int, int], built: list[str]) -> bool:
    """Return whether a build has kernels for a GPU: binary code of its major version up to its minor one, or earlier PTX."""
    for name in built:
        kind, _, number = name.partition("_")
        digits = "".join(filter(str.isdigit, number))
        if not digits:
            continue
        own = (int(digits[:-1] or 0), int(digits[-1]))
        if (kind == "sm" and own[0] == capability[0] and own <= capability) or (kind == "compute" and own <= capability):
            return True
    return False


def has_peer_access(num_gpus: int) -> bool | None:
    """Return whether each GPU can access the memory of all others; None if there are fewer than two."""
    pairs = itertools.permutations(range(num_gpus), 2)
    return all(torch.cuda.can_device_access_peer(*pair) for pair in pairs) if num_gpus > 1 else None
