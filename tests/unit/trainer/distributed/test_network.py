"""The interfaces that a group listens on, and the addresses that other machines can reach."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace

import pytest

from trainer.distributed import network
from trainer.distributed.network import chosen_interfaces, keep_private, public_addresses

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NAMES = ["lo", "eth0", "eth1", "ib0"]


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in INTERFACES:
        monkeypatch.setenv(name, "eth0")


def group(ranks_here: int, ranks: int, **more: str) -> dict[str, str]:
    """Return the variables of a rank as torchrun sets them."""
    own = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks_here), "WORLD_SIZE": str(ranks)}
    return {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"} | own | more


def test_public_addresses_are_those_of_the_internet() -> None:
    private = ["127.0.0.1", "::1", "10.1.2.3", "172.20.0.1", "192.168.0.9", "169.254.1.1", "100.64.0.1", "fe80::1%eth0", "fd00::2"]
    assert public_addresses(private) == []
    assert public_addresses(["8.8.8.8", *private, "2606:4700::1111%eth0", "8.8.8.8"]) == ["8.8.8.8", "2606:4700::1111"]


def test_one_node_uses_loopback_whatever_the_environment_says(caplog: pytest.LogCaptureFixture) -> None:
    keep_private(group(8, 8, TRAINER_STORE="/folder", MASTER_ADDR="8.8.8.8"))
    assert [os.environ[name] for name in INTERFACES] == ["lo", "lo"]
    assert caplog.messages == []


def test_a_process_outside_a_group_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    keep_private({})
    assert [os.environ[name] for name in INTERFACES] == ["eth0", "eth0"]
    assert caplog.messages == []


@pytest.mark.parametrize(("changes", "warnings"), [({}, 1), ({"RANK": "1"}, 0), ({"TRAINER_STORE": "/folder"}, 0)])
def test_the_first_rank_warns_of_a_torchrun_that_was_started_by_hand(
    caplog: pytest.LogCaptureFixture, changes: dict[str, str], warnings: int
) -> None:
    keep_private(group(2, 2, **changes))
    assert len(caplog.messages) == warnings


@pytest.mark.parametrize(
    ("master", "own", "told"),
    [
        ("10.0.0.4", "10.0.0.5", ""),
        ("8.8.8.8", "10.0.0.5", "8.8.8.8"),
        ("10.0.0.4", "9.9.9.9", "9.9.9.9"),
        ("no-such-host.invalid", "10.0.0.5", ""),
    ],
)
def test_several_nodes_are_warned_of_public_addresses_and_keep_their_interfaces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, master: str, own: str, told: str
) -> None:
    addresses = {"eth0": [SimpleNamespace(family=socket.AF_INET, address=own)]}
    monkeypatch.setattr(network, "psutil", SimpleNamespace(net_if_addrs=lambda: addresses))
    with caplog.at_level(logging.WARNING):
        keep_private(group(8, 16, MASTER_ADDR=master))
        keep_private(group(8, 16, MASTER_ADDR=master, LOCAL_RANK="1", RANK="1"))
    assert [os.environ[name] for name in INTERFACES] == ["eth0", "eth0"]
    assert [message.partition("public address ")[2].split(". ")[0] for message in caplog.messages] == ([told] if told else [])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, NAMES),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, NAMES),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}, ["ib0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth"}, ["eth0", "eth1", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=eth1"}, ["eth1", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^lo,eth"}, ["eth1", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^=eth0"}, ["lo", "eth1", "ib0"]),
        ({"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0", "GROUP_RANK": "0"}, NAMES),
    ],
)
def test_interfaces_are_chosen_as_gloo_and_nccl_do(variables: dict[str, str], expected: list[str]) -> None:
    assert chosen_interfaces(NAMES, {"GROUP_RANK": "1"} | variables) == expected
