"""Process settings that the bits of a run depend on."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from common.errors import ConfigError
from common.hardware import num_cores
from trainer.config import TrainConfig
from trainer.distributed.devices import check_no_gpu_is_hidden
from trainer.launch.environment import openmp_threads
from trainer.machine.environment import from_cpuinfo

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FIRST_FLAGS = (
    "ATEN_CPU_CAPABILITY",
    _WORKSPACE,
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Environment variables that select other kernels and thus change bits. The first versions recorded only these."""
_FLAGS = (
    *_FIRST_FLAGS,
    "CUBLASLT_WORKSPACE_SIZE",
    "DISABLE_ADDMM_CUDA_LT",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_GRAPH_FILE",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_NVLS_ENABLE",
    "NCCL_TOPO_FILE",
    "NCCL_TUNER_CONFIG_FILE",
    "NCCL_TUNER_PLUGIN",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
_TUNABLE_KERNELS = "PYTORCH_TUNABLEOP_"  # beginning of the variables of torch's choice of kernels by timing
_COMPILER = "TORCHINDUCTOR_"
"""Beginning of the settings of torch.compile. All may select other kernels, except for those that end with `_NO_KERNELS`."""
_NO_KERNELS = ("_CACHE", "_COMPILE_THREADS", "_DIR", "_FILE", "_HOST", "_PATH", "_PORT", "_TIMEOUT", "_URL")
_PLAIN_VALUE = re.compile(r"[\w.,:+-]{1,64}")
"""A number, a word or a list of words. Other values of the compiler's settings, such as addresses, do not belong in a record."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SWITCHES: Sequence[tuple[Any, str]] = (
    (torch.utils.deterministic, "fill_uninitialized_memory"),
    (torch.backends.cudnn, "benchmark"),
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn, "allow_tf32"),
)
_REPEATABLE_WORKSPACES = (":4096:8", ":16:8")


def configure_determinism(config: TrainConfig) -> None:
    """Set thread count, TF32 and, unless `reproducibility = off`, deterministic kernels. Call it before a GPU is used."""
    torch.set_num_threads(threads_per_rank(config))
    deterministic = config.reproducibility != "off"
    if deterministic:
        _check_environment(config)
        os.environ.setdefault(_WORKSPACE, _REPEATABLE_WORKSPACES[0])  # cuBLAS reads it once, with the first handle
    # `use_deterministic_algorithms` also sets Inductor, and imports it for that: 1.4 s of CPU where nothing is compiled.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # The default fills every new tensor, which protects only against kernels that read uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
    if config.compiles("cpu") or torch.cuda.is_available():  # on GPUs `flex` attention is always compiled
        torch._inductor.config.deterministic = deterministic  # else timing trials may choose the configuration of reductions
        # Inductor of some releases before 2.13 warns if it chooses another kernel. The user cannot do anything about it.
        warnings.filterwarnings("ignore", r"\s*Online softmax is disabled on the fly", UserWarning)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32


@contextmanager
def kept_process_settings() -> Iterator[None]:
    """Restore at the end what `configure_determinism` sets."""
    workspace, mode = os.environ.get(_WORKSPACE), torch.get_deterministic_debug_mode()
    threads, switches = torch.get_num_threads(), [getattr(owner, name) for owner, name in _SWITCHES]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        for (owner, name), value in zip(_SWITCHES, switches, strict=True):
            setattr(owner, name, value)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def settings_here(config: TrainConfig) -> TrainConfig:
    """Return the settings with which this machine can use a run: at most one thread per core; without a GPU, a CPU's attention.

    The precision stays, because CPUs compute in all precisions; a float8 run is used in bf16 on any machine.
    """
    cores = num_cores()
    if config.threads is not None and config.threads > cores:
        config = config.model_copy(update={"threads": cores})
    if torch.cuda.is_available():
        return config
    if config.device != "cpu":
        check_no_gpu_is_hidden()
    attention = "auto" if config.attention in ("varlen", "flex") else config.attention
    return config.model_copy(update={"device": "cpu", "attention": attention})


def threads_per_rank(config: TrainConfig) -> int:
    """Return the CPU threads of one rank. Under `elastic` the default is 1, because a share would depend on the number of ranks."""
    if config.threads is not None:
        return config.threads
    if config.reproducibility == "elastic":
        return 1
    return openmp_threads(os.environ) or max(1, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def device_name(device: torch.device) -> str:
    """Return the model of the GPU. For a CPU, return the properties that select its kernels, because its name does not."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {cpu_kernels()}"


def cpu_kernels() -> str:
    """Return the properties of the CPU that select kernels and the block sizes of matrices: vendor, instruction sets, caches.

    Two CPUs of torch's level AVX512 can compute different bits. MKL depends on the vendor, oneDNN on instructions beyond that
    level and on the cache sizes.
    """
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}  # new in PyTorch 2.11
    narrow = sorted(
        name for name, has in known.items() if has is True and name.endswith(("bf16", "fp16", "fp16_arith", "sve", "sve2"))
    )
    maker = from_cpuinfo("vendor_id", "CPU implementer", "CPU part")  # a name on x86, numbers on ARM
    caches = "+".join(path.read_text().strip() for path in sorted(_CACHES.glob("index*/size")))
    return " ".join(filter(None, (*maker, torch.backends.cpu.get_cpu_capability(), *narrow, caches)))


def flags() -> dict[str, str]:
    """Return the set environment variables that select kernels. Of a value that is a path, the digest is returned."""
    found = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_COMPILER):
            is_known = not name.endswith(_NO_KERNELS) and _PLAIN_VALUE.fullmatch(value) is not None
        else:
            is_known = name in _FLAGS or name.startswith(_TUNABLE_KERNELS)
        if is_known:
            found[name] = value
    return {name: f"sha256:{sha256(value.encode()).hexdigest()}" if "/" in value else value for name, value in found.items()}


def not_compared(recorded: Mapping[str, Any], identity: Mapping[str, Any]) -> set[str]:
    """Return the names in two identities that change no bit of this run, or that an older version did not record.

    On a GPU the number of CPU threads changes no bit. NCCL adds gradients only between several GPUs, and not under `elastic`, where
    each rank adds the parts that NCCL has moved.
    """
    names = recorded.keys() | identity.keys()
    on_gpu = not str(identity.get("device")).startswith("cpu")
    skipped = {"threads"} if on_gpu else set()
    if not on_gpu or identity.get("reproducibility") == "elastic" or identity.get("world_size") == 1:
        skipped |= {"nodes", "nccl", *(name for name in names if name.startswith("flags.NCCL_"))}
    if "nccl" not in recorded:
        first = {f"flags.{name}" for name in _FIRST_FLAGS}
        skipped |= {"nodes", "nccl", *(name for name in names if name.startswith("flags.") and name not in first)}
    return skipped


def seed_micro_batch(seed: int, step: int, number: int, draw: int = 0) -> None:
    """Seed torch's generators for one pass over a micro-batch of one step, by its number within the global batch.

    `draw` distinguishes several passes over one micro-batch. The state of the generators is then a function of the counters. It is
    not saved, and does not depend on the ranks.
    """
    mixed = (seed * 1_000_003 + step) * 65_537 + number + (draw << 48) & (1 << 63) - 1
    torch.default_generator.manual_seed(mixed)  # torch.manual_seed also queries missing devices, 1.2 ms for each call
    if torch.cuda.is_available():
        torch.cuda.manual_seed(mixed)


def _check_environment(config: TrainConfig) -> None:
    workspace = os.environ.get(_WORKSPACE)
    if workspace is not None and workspace not in _REPEATABLE_WORKSPACES:
        raise ConfigError(
            f"{_WORKSPACE} = {workspace} lets cuBLAS compute other bits in each run; unset it, set it to "
            f"{' or '.join(_REPEATABLE_WORKSPACES)}, or use --reproducibility off"
        )
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if os.environ.get(name) == "1" and not config.tf32:
            raise ConfigError(f"{name} = 1 turns TF32 on, and the setting is tf32 = false; unset it, or use --tf32 true")
