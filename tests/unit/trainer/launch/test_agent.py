"""A node notices that the torchrun of the first node has ended."""

from __future__ import annotations

import socket
import threading

from trainer.launch.agent import wait_for_end


def test_the_wait_lasts_until_the_process_behind_the_port_closes_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        waiting = threading.Thread(target=wait_for_end, args=store.getsockname())
        waiting.start()
        connection, _ = store.accept()
        waiting.join(0.3)
        assert waiting.is_alive()
        connection.close()
        waiting.join(10)
        assert not waiting.is_alive()


def test_the_wait_is_over_at_once_if_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        address = store.getsockname()
    wait_for_end(*address)
