"""Check of the adapters for RDMA, which NCCL uses between nodes. It imports the standard library alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.doctor.check import Check, Severity, check

__all__ = ["RdmaReading", "check_rdma", "read_rdma"]

_VERBS, _PLUGIN = "libibverbs.so.1", "libnccl-net.so"
"""The libraries that NCCL loads for adapters of InfiniBand and RoCE, and for EFA (the plugin aws-ofi-nccl)."""
_TCP = "so NCCL uses TCP between nodes"
_INSTALL = {
    _VERBS: "install libibverbs1 and ibverbs-providers; in containers build the image again: make image",
    _PLUGIN: "install the plugin aws-ofi-nccl for EFA (docs/cluster.md)",
}


@dataclass(frozen=True)
class RdmaReading:
    adapters: tuple[str, ...] = ()
    has_devices: bool = False
    """Whether /dev/infiniband exists. A container sees the adapters of its host even if it did not receive them."""
    missing: tuple[str, ...] = ()
    """Libraries that NCCL needs for these adapters and that cannot be loaded."""


def read_rdma(root: Path = Path("/")) -> RdmaReading:
    adapters = sorted((root / "sys/class/infiniband").glob("*"))
    drivers = {(adapter / "device/driver").resolve().name for adapter in adapters}
    needed = [_VERBS, *([_PLUGIN] if "efa" in drivers else [])]
    return RdmaReading(
        tuple(adapter.name for adapter in adapters),
        (root / "dev/infiniband").is_dir(),
        tuple(name for name in needed if adapters and not _can_load(name)),
    )


def _can_load(library: str) -> bool:
    with suppress(OSError):
        ctypes.CDLL(library)
        return True
    return False


@check("network", "machine")
def check_rdma(rdma: RdmaReading, variables: Mapping[str, str], *, num_nodes: int, num_gpus: int) -> Sequence[Check]:
    """Return the row of RDMA; none for a training that does not use it: without GPUs, or on one node without adapters."""
    if not num_gpus or (num_nodes < 2 and not rdma.adapters):
        return []
    worse = Severity.WARNING if num_nodes > 1 else Severity.NOTE
    needed, names = "adapters for RDMA, their devices and their libraries", ", ".join(rdma.adapters)
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        return [
            Check("RDMA", f"NCCL_IB_DISABLE is set, {_TCP}", Severity.NOTE, needed, "remove NCCL_IB_DISABLE to use the adapters")
        ]
    if not rdma.adapters:
        remedy = "use nodes with InfiniBand, RoCE or EFA if the links between the nodes limit the training"
        return [Check("RDMA", f"no adapter (/sys/class/infiniband), {_TCP}", Severity.NOTE, needed, remedy)]
    if rdma.missing:
        remedy = "; ".join(_INSTALL[name] for name in rdma.missing)
        return [Check("RDMA", f"{names}, but {' and '.join(rdma.missing)} cannot be loaded, {_TCP}", worse, needed, remedy)]
    if not rdma.has_devices:
        remedy = "give the devices to the container: --device=/dev/infiniband, or `devices` in a Compose file"
        return [Check("RDMA", f"{names}, but there is no /dev/infiniband, {_TCP}", worse, needed, remedy)]
    return [Check("RDMA", f"{names} and their libraries", Severity.OK, needed)]
