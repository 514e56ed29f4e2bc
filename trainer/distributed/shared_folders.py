"""Checks at the start of a run on several nodes: all nodes have the same run folder, and the same prepared data.

Otherwise each node would write its heartbeats into a separate folder, and a restart could find checkpoints on one node only.
"""

from __future__ import annotations

import secrets
import socket
import time
from pathlib import Path

from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError, read_input, write_atomic
from trainer.distributed.group import Group

WAIT_S = 90.0  # longest wait for the file of rank 0. NFS may remember for 60 s that a folder does not exist (`acdirmax` in nfs(5)).
_POLL_S = 0.2
_PREFIX, _NONCE_BYTES = ".shared-", 8  # a name in `_FILES` of trainer/runs/layout.py
_MAX_BYTES = 64


def check_shared(run: Path, group: Group) -> None:
    # The name of the file is new each time, because a network file system may remember that a name does not exist.
    if group.num_nodes == 1:
        return
    name = group.on_main(lambda: _write_mark(run))
    try:
        group.on_all(lambda: _wait_for(run / name) if group.local_rank == 0 else None)
    finally:
        if group.is_main:
            (run / name).unlink(missing_ok=True)


def check_same_data(data: Path, root_digest: str, group: Group) -> None:
    if group.num_nodes == 1:
        return
    wanted = group.on_main(lambda: root_digest)

    def compare() -> None:
        if root_digest != wanted:
            raise PreparedDataError(
                f"{data}: on this node ({socket.gethostname()}) the root digest is {root_digest}, but on the node of rank 0 it is "
                f"{wanted}; all nodes need the same prepared data: copy that folder to this node, or share it"
            )

    group.on_all(compare)


def _write_mark(run: Path) -> str:
    for left in run.glob(f"{_PREFIX}{'[0-9a-f]' * 2 * _NONCE_BYTES}"):
        left.unlink(missing_ok=True)
    name = f"{_PREFIX}{secrets.token_hex(_NONCE_BYTES)}"
    write_atomic(run / name, name.encode())
    return name


def _wait_for(mark: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    reason = ""
    while not reason or time.monotonic() < deadline:
        try:
            list(mark.parent.iterdir())  # makes NFS ask the server for new entries
            if read_input(mark, _MAX_BYTES, below=mark.parent) == mark.name.encode():
                return
            reason = "it has another content here"
        except (OSError, UnusableFileError) as error:
            reason = str(error)
        time.sleep(_POLL_S)
    raise ConfigError(
        f"{mark.parent.absolute()} on this node ({socket.gethostname()}) is not the run folder of rank 0: a file that rank 0 wrote "
        f"there is not seen after {WAIT_S:g} s ({reason}). A run on several nodes needs a run folder that all nodes share, such as "
        "NFS or Lustre: mount it at the same path on every node, and name it with --run"
    )
