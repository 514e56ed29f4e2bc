"""Checks of the network between nodes: the address at which they meet, and adapters for RDMA. No torch is loaded."""

from __future__ import annotations

import ctypes
import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from common.errors import ConfigError
from common.hardware import num_cores
from trainer.doctor.check import Check, Severity, check
from trainer.launch.environment import check_variables, missing_variables

_DEFAULT_PORT = 29500  # the port of torchrun
_LAST_PORT = 65535
_TIMEOUT_S = 2.0
Reached = Literal["open", "refused", "no answer", "no route", "unknown host", "free", "in use", "not allowed", "not own"]
"""Result of a try: of a connection to the first node, or, on the first node, of listening on the port."""
_VERBS, _PLUGIN = "libibverbs.so.1", "libnccl-net.so"
"""The libraries that NCCL loads for adapters of InfiniBand and RoCE, and for EFA (the plugin aws-ofi-nccl)."""
_INSTALL = {
    _VERBS: "install libibverbs1 and ibverbs-providers; in containers build the image again: make image",
    _PLUGIN: "install the plugin aws-ofi-nccl for EFA (docs/cluster.md)",
}


@dataclass(frozen=True)
class Meeting:
    host: str
    port: int
    num_nodes: int
    is_first: bool  # whether this node is the first one, which listens at the address


def meeting_of(variables: Mapping[str, str]) -> Meeting | None:
    """Return where the nodes meet, by the variables of torchrun, Slurm or SkyPilot; None for one node."""
    known = {**variables, **missing_variables(variables, 0, num_cores())}
    check_variables(known)
    num_nodes = int((known.get("PET_NNODES") or "1").rpartition(":")[2])
    if num_nodes < 2:
        return None
    host, port = known.get("PET_MASTER_ADDR") or "", known.get("PET_MASTER_PORT") or ""
    if endpoint := known.get("PET_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", port)
    if port and not (port.isdecimal() and 1 <= int(port[:6]) <= _LAST_PORT):
        raise ConfigError(f"PET_RDZV_ENDPOINT = {known.get('PET_RDZV_ENDPOINT')} must be HOST:PORT, with a port up to {_LAST_PORT}")
    is_first = known.get("PET_NODE_RANK", "") == "0"
    return Meeting(host.strip("[]"), int(port or _DEFAULT_PORT), num_nodes, is_first)


def reach(meeting: Meeting, timeout_s: float = _TIMEOUT_S) -> Reached:
    try:
        addresses = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except OSError:
        return "unknown host"
    if meeting.is_first:
        return _listen(addresses, meeting.port)
    for family, kind, protocol, _, address in addresses:
        with closing(socket.socket(family, kind, protocol)) as connection:
            connection.settimeout(timeout_s)
            try:
                connection.connect(address)
                return "open"
            except TimeoutError:
                found: Reached = "no answer"
            except ConnectionRefusedError:
                found = "refused"
            except OSError:
                found = "no route"
    return found


def _listen(addresses: Sequence[Any], port: int) -> Reached:
    """Listen as torchrun does: on all addresses of this machine, one of which must be that of the first node."""
    is_own = False
    for family, kind, protocol, _, place in addresses:
        with closing(socket.socket(family, kind, protocol)) as probe, suppress(OSError):
            probe.bind((place[0], 0))
            is_own = True
    if not is_own:
        return "not own"
    for family, host in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):  # a machine may have no IPv6
        try:
            with socket.create_server((host, port), family=family, dualstack_ipv6=family is socket.AF_INET6):
                return "free"
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES):
                return "in use" if error.errno == errno.EADDRINUSE else "not allowed"
    return "not own"


def count_nodes(variables: Mapping[str, str]) -> int:
    with suppress(ConfigError):
        meeting = meeting_of(variables)
        return 1 if meeting is None else meeting.num_nodes
    return 1


@check("network", "machine")
def check_nodes(variables: Mapping[str, str]) -> Check:
    try:
        meeting = meeting_of(variables)
    except ConfigError as error:
        return Check("nodes", str(error), Severity.ERROR, "variables that torchrun can use", "correct the variable")
    return Check("nodes", "one node, which needs no network") if meeting is None else check_meeting(meeting, reach(meeting))


def check_meeting(meeting: Meeting, reached: Reached) -> Check:
    place = f"{meeting.host}:{meeting.port}"
    needed = f"the {meeting.num_nodes} nodes reach the first one at PET_MASTER_ADDR and PET_MASTER_PORT"
    found, severity, remedy = _FINDINGS[reached]
    return Check("nodes", f"{place}: {found}", severity, needed, remedy)


_FINDINGS: dict[Reached, tuple[str, Severity, str]] = {
    "open": ("it accepts connections", Severity.OK, ""),
    "free": ("this is the first node, and the port is free", Severity.OK, ""),
    "refused": (
        "the host responds, but nothing listens there yet",
        Severity.NOTE,
        "start the first node, and run the doctor again to see the connection",
    ),
    "no answer": (
        "no response within 2 s, so the port is probably blocked",
        Severity.ERROR,
        "open this port, and those above 1024 between the nodes, in the firewall or security group of the first node",
    ),
    "no route": (
        "the host cannot be reached",
        Severity.ERROR,
        "set PET_MASTER_ADDR to an address of the first node in the network that all nodes share",
    ),
    "unknown host": (
        "no address is known for this name",
        Severity.ERROR,
        "set PET_MASTER_ADDR to a name that each node can look up, or to an IP address",
    ),
    "in use": (
        "another program listens on this port",
        Severity.ERROR,
        "end that program (ss -ltnp shows it), or set PET_MASTER_PORT to another port on all nodes",
    ),
    "not allowed": (
        "this user may not listen on this port",
        Severity.ERROR,
        "set PET_MASTER_PORT to a port from 1024 to 65535 on all nodes",
    ),
    "not own": (
        "this is node 0, but the address belongs to another machine",
        Severity.ERROR,
        "set PET_MASTER_ADDR to an address of node 0, or PET_NODE_RANK to the number of this node",
    ),
}
"""What a result means, how severe it is, and what to do."""


@check("network", "machine")
def check_rdma(variables: Mapping[str, str], num_nodes: int, num_gpus: int, root: Path = Path("/")) -> Sequence[Check]:
    """Return the row of RDMA; none for a training that does not use it: without GPUs, or on one node without adapters."""
    adapters = sorted((root / "sys/class/infiniband").glob("*"))
    if not num_gpus or (num_nodes < 2 and not adapters):
        return []
    severity, needed = Severity.NOTE, "adapters for RDMA, their devices and their libraries"
    names = ", ".join(adapter.name for adapter in adapters)
    missing = []
    for library in (_VERBS, *([_PLUGIN] if "efa" in {(one / "device/driver").resolve().name for one in adapters} else [])):
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(library)
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        found, remedy = "NCCL_IB_DISABLE is set", "remove NCCL_IB_DISABLE to use the adapters"
    elif not adapters:
        found = "no adapter (/sys/class/infiniband)"
        remedy = "use nodes with InfiniBand, RoCE or EFA if the links between the nodes limit the training"
    elif missing:
        severity = Severity.WARNING if num_nodes > 1 else Severity.NOTE
        found = f"{names}, but {' and '.join(missing)} cannot be loaded"
        remedy = "; ".join(_INSTALL[name] for name in missing)
    elif not (root / "dev/infiniband").is_dir():  # a container sees the adapters of its host even if it did not receive them
        severity = Severity.WARNING if num_nodes > 1 else Severity.NOTE
        found = f"{names}, but there is no /dev/infiniband"
        remedy = "give the devices to the container: --device=/dev/infiniband, or `devices` in a Compose file"
    else:
        return [Check("RDMA", f"{names} and their libraries", Severity.OK, needed)]
    return [Check("RDMA", f"{found}, so NCCL uses TCP between nodes", severity, needed, remedy)]
