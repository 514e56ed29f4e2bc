"""The address at which nodes meet, with real sockets on loopback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from common.errors import ConfigError
from trainer.doctor.check import Severity, refuse_errors
from trainer.doctor.network import Meeting, check_meeting, check_nodes, meeting_of, reach


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        own.listen(8)
        yield own


def meeting(port: int, *, is_first: bool = False) -> Meeting:
    return Meeting("127.0.0.1", port, 2, is_first)


def port_of(own: socket.socket) -> int:
    return int(own.getsockname()[1])


def test_a_first_node_that_listens_is_reached(listener: socket.socket) -> None:
    there = meeting(port_of(listener))
    assert reach(there) == "open"
    assert check_meeting(there, "open").severity is Severity.OK


def test_a_blocked_port_is_an_error_that_names_the_firewall() -> None:
    with ExitStack() as stack:
        silent = stack.enter_context(socket.socket())  # a full queue drops further connections, as a firewall does
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        there = meeting(port_of(silent))
        found = reach(there, timeout_s=0.3)
    assert found == "no answer"
    row = check_meeting(there, found)
    assert (row.severity, "firewall" in row.remedy) == (Severity.ERROR, True)
    with pytest.raises(ConfigError, match="nodes"):
        refuse_errors([row])


def test_a_first_node_that_has_not_started_is_only_a_note(listener: socket.socket) -> None:
    there = meeting(port_of(listener))
    listener.close()
    assert reach(there) == "refused"
    assert check_meeting(there, "refused").severity is Severity.NOTE


def test_a_port_of_the_first_node_that_another_program_uses_is_an_error(listener: socket.socket) -> None:
    own = meeting(port_of(listener), is_first=True)
    assert reach(own) == "in use"
    assert "PET_MASTER_PORT" in check_meeting(own, "in use").remedy
    listener.close()
    assert reach(own) == "free"


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_a_port_in_use_at_any_address_of_this_machine_is_found(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        own = Meeting("localhost", port_of(other), 2, is_first=True)
        assert reach(own) == "in use"
    assert reach(own) == "free"


def test_a_first_node_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    own = meeting(port_of(listener), is_first=True)
    assert reach(own) == "in use"
    listener.close()
    assert reach(own) == "free"


def test_an_address_of_another_machine_on_the_first_node_is_an_error() -> None:
    assert reach(Meeting("192.0.2.1", 29500, 2, is_first=True)) == "not own"
    assert check_meeting(meeting(1, is_first=True), "not own").severity is Severity.ERROR


def test_a_name_without_an_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    there = Meeting("head-node", 29500, 2, is_first=False)
    assert reach(there) == "unknown host"
    assert check_meeting(there, "unknown host").severity is Severity.ERROR


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PET_NNODES": "1", "PET_MASTER_ADDR": "a"}, None),
        ({"PET_NNODES": "2", "PET_MASTER_ADDR": "a", "PET_NODE_RANK": "1"}, Meeting("a", 29500, 2, False)),
        (
            {"PET_NNODES": "2:4", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "4000", "PET_NODE_RANK": "0"},
            Meeting("a", 4000, 4, True),
        ),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "[::1]:4000"}, Meeting("::1", 4000, 2, False)),
        (
            {"SLURM_JOB_NODELIST": "node[01-04]", "SLURM_NNODES": "4", "SLURM_NODEID": "3"},
            Meeting("node01", 29500, 4, False),
        ),
    ],
)
def test_the_address_comes_from_torchrun_or_the_scheduler(variables: dict[str, str], expected: Meeting | None) -> None:
    assert meeting_of(variables) == expected


def test_variables_that_torchrun_refuses_are_named() -> None:
    with pytest.raises(ConfigError, match="PET_MASTER_ADDR is not set"):
        meeting_of({"PET_NNODES": "2"})
    assert check_nodes({}).severity is Severity.OK
    assert check_nodes({"PET_NNODES": "2"}).severity is Severity.ERROR
    for endpoint in ("a:99999", "a:0", "a:x", "a:" + "9" * 5000):
        with pytest.raises(ConfigError, match="PET_RDZV_ENDPOINT"):
            meeting_of({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": endpoint})
