"""Two network namespaces with a cable between them, which a test can cut. Needs root and the command `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_INTERFACE = "wire"
_NETWORK = "10.93.7"


@dataclass(frozen=True)
class Cable:
    """A pair of connected interfaces, one in each namespace."""

    namespaces: tuple[str, str]

    def command(self, node: int) -> tuple[str, ...]:
        """Return the beginning of a command line that runs a command in a namespace."""
        return ("ip", "netns", "exec", self.namespaces[node])

    def variables(self) -> dict[str, str]:
        """Return the variables with which the nodes of a run meet over the cable."""
        return {"PET_MASTER_ADDR": f"{_NETWORK}.1", "GLOO_SOCKET_IFNAME": _INTERFACE}

    def cut(self, node: int) -> None:
        """Switch the interface of a namespace off. Packets are lost, and connections stay open."""
        _ip("-n", self.namespaces[node], "link", "set", _INTERFACE, "down")

    def mend(self, node: int) -> None:
        """Switch the interface of a namespace on again."""
        _ip("-n", self.namespaces[node], "link", "set", _INTERFACE, "up")


def why_not() -> str:
    """Return why this machine cannot make network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "the command ip is missing (Debian: apt-get install iproute2)"
    name = f"trainer-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made ({made.stderr.strip()})"
    pair = ["ip", "-n", name, "link", "add", "one", "type", "veth", "peer", "name", "two"]
    linked = subprocess.run(pair, capture_output=True, text=True, check=False)
    _ip("netns", "del", name)
    return f"pairs of interfaces cannot be made ({linked.stderr.strip()})" if linked.returncode else ""


@contextmanager
def connected_namespaces() -> Iterator[Cable]:
    """Make two namespaces with a cable between them, and remove them at the end of the block."""
    names = (f"trainer-{os.getpid()}-a", f"trainer-{os.getpid()}-b")
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", names[0], "link", "add", _INTERFACE, "type", "veth", "peer", "name", _INTERFACE, "netns", names[1])
        for number, name in enumerate(names, 1):
            _ip("-n", name, "addr", "add", f"{_NETWORK}.{number}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
        yield Cable(names)
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
