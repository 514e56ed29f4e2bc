"""Access to a group of ranks: one node opens no port to others, and several nodes need a private network between them.

torchrun's rendezvous and the stores and sockets of gloo and NCCL ask for no password, and the agents of a c10d rendezvous
unpickle what they receive. Anyone who can connect to them can run code as the user who trains.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

STORE_VARIABLE = "TRAINER_STORE"  # environment variable with the private directory in which the ranks of one node meet

_LOOPBACK = "lo"
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

_log = logging.getLogger(__name__)

_STARTED_BY_HAND = (
    "torchrun was started by hand: its rendezvous listens on all network interfaces, and anyone who connects to it can run code as "
    "this user. Use entrypoints/train, which opens no port to other machines, or a machine that no other machine can reach"
)
_PUBLIC = (
    "this group of several nodes uses the public address %s. Its ports need no password, and anyone who connects to them can run "
    "code as this user. Use a private network between the nodes (PET_MASTER_ADDR, GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and a "
    "firewall against all other machines"
)


def keep_private(variables: Mapping[str, str]) -> None:
    """Restrict gloo and NCCL to loopback if all ranks are on this node, and warn if other machines can reach the group."""
    if "WORLD_SIZE" not in variables:
        return
    if variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"]:
        os.environ.update(dict.fromkeys(_INTERFACE_VARIABLES, _LOOPBACK))
        if variables.get("RANK") == "0" and "TORCHELASTIC_RUN_ID" in variables and STORE_VARIABLE not in variables:
            _log.warning(_STARTED_BY_HAND)
    elif variables.get("LOCAL_RANK") == "0":
        found: list[str] = []
        with suppress(OSError):  # joining the group reports a name that cannot be looked up
            found += [
                str(info[4][0]) for info in socket.getaddrinfo(variables.get("MASTER_ADDR", ""), None, type=socket.SOCK_STREAM)
            ]
        by_name = psutil.net_if_addrs()
        own = [each for name in chosen_interfaces(list(by_name), variables) for each in by_name[name]]
        found += [each.address for each in own if each.family in (socket.AF_INET, socket.AF_INET6)]
        if public := public_addresses(found):
            _log.warning(_PUBLIC, ", ".join(public))


def public_addresses(addresses: Sequence[str]) -> list[str]:
    plain = dict.fromkeys(address.partition("%")[0] for address in addresses)  # fe80::1%eth0 includes the interface
    return [address for address in plain if ipaddress.ip_address(address).is_global]


def chosen_interfaces(names: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Return the network interfaces on which a node listens. These are all `names` if a variable is missing, and on the first node,
    where the rendezvous listens on all. gloo uses the names in GLOO_SOCKET_IFNAME, NCCL those that begin with a word of
    NCCL_SOCKET_IFNAME; `=` before the words requires equal names, and `^` selects all others.
    """
    gloo, nccl = (variables.get(name) for name in _INTERFACE_VARIABLES)
    if not gloo or not nccl or variables.get("GROUP_RANK") == "0":
        return list(names)
    words = nccl.lstrip("^=").split(",")
    equal, others = "=" in nccl[:2], nccl.startswith("^")
    by_nccl = [name for name in names if any(name == word if equal else name.startswith(word) for word in words) != others]
    return [name for name in names if name in gloo.split(",") or name in by_nccl]
