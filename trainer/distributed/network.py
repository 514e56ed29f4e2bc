"""Who can reach a group of ranks: on one node nobody else may, and on several nodes the network between them must be private.

Neither torchrun's rendezvous nor the stores and sockets of gloo and NCCL ask for a password, and the agents of a c10d rendezvous
unpickle what they read. Anyone who can connect to them can run code as the user who trains.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

__all__ = ["STORE_VARIABLE", "chosen_interfaces", "keep_private", "public_addresses"]

STORE_VARIABLE = "TRAINER_STORE"
"""Names a private directory in which the ranks of one node find each other."""

_LOOPBACK = "lo"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_log = logging.getLogger(__name__)

_STARTED_BY_HAND = (
    "torchrun was started by hand: its rendezvous listens on all network interfaces, and anyone who connects to it can run code as "
    "this user. Use entrypoints/train, which opens nothing to other machines, or a machine that no other can reach"
)
_PUBLIC = (
    "this group of several nodes uses the public address %s. Its ports need no password, and anyone who connects to them can run "
    "code as this user. Use a private network between the nodes (PET_MASTER_ADDR, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and a "
    "firewall against all others"
)


def keep_private(variables: Mapping[str, str]) -> None:
    """Keeps gloo and NCCL on loopback where all ranks are on this node, and warns of what other machines can reach.

    To be called by every rank before it joins its group. On one node other interfaces than loopback are never used, also where
    a variable names one.

    Args:
        variables: the environment, in which torchrun describes the group; a process that is none of its ranks is left alone.
    """
    if "WORLD_SIZE" not in variables:
        return
    if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
        os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, _LOOPBACK))
        if variables.get("RANK") == "0" and "TORCHELASTIC_RUN_ID" in variables and STORE_VARIABLE not in variables:
            _log.warning(_STARTED_BY_HAND)
    elif variables.get("LOCAL_RANK") == "0":
        found = [*_resolved(variables.get("MASTER_ADDR", "")), *_own_addresses(variables)]
        if public := public_addresses(found):
            _log.warning(_PUBLIC, ", ".join(public))


def public_addresses(addresses: Sequence[str]) -> list[str]:
    """Those of the IP addresses that are valid in the whole internet, each once, in their order."""
    plain = dict.fromkeys(address.partition("%")[0] for address in addresses)  # fe80::1%eth0 names its interface too
    return [address for address in plain if ipaddress.ip_address(address).is_global]


def chosen_interfaces(names: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The network interfaces on which a node listens.

    Args:
        names: all interfaces of this node.
        variables: gloo takes the names in GLOO_SOCKET_IFNAME. NCCL takes all that begin with a word of NCCL_SOCKET_IFNAME; `=`
            before the words asks for equal names, and `^` for all others. Without one of the two, and on the first node, where
            the rendezvous listens on all interfaces, all are taken.
    """
    gloo, nccl = (variables.get(name) for name in _INTERFACE_VARIABLES)
    if not gloo or not nccl or variables.get("GROUP_RANK") == "0":
        return list(names)
    words = nccl.lstrip("^=").split(",")
    equal, others = "=" in nccl[:2], nccl.startswith("^")
    by_nccl = [name for name in names if any(name == word if equal else name.startswith(word) for word in words) != others]
    return [name for name in names if name in gloo.split(",") or name in by_nccl]


def _own_addresses(variables: Mapping[str, str]) -> list[str]:
    by_name = psutil.net_if_addrs()
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        each.address for name in chosen_interfaces(list(by_name), variables) for each in by_name[name] if each.family in families
    ]


def _resolved(host: str) -> list[str]:
    """The addresses of a host; none where it cannot be looked up, which the group itself will report."""
    with suppress(OSError):
        return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []
