import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import ProjectError
from tests.support.ranks import run_ranks
from trainer.distributed import group as shared_folders
from trainer.distributed.group import Group, check_same_data, check_shared


def on_nodes(group: Group, *folders: Path) -> str:
    """Check with each rank on a different node that has its own folder. Returns the message of the error, if there is one."""
    shared_folders.WAIT_S = 0.5
    try:
        check_shared(folders[group.rank], replace(group, local_rank=0, local_world_size=1))
    except ProjectError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_folder_that_all_nodes_share_is_accepted_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / ".shared-0123456789abcdef").write_text("of a killed start")
    assert run_ranks(on_nodes, 3, tmp_path, tmp_path, tmp_path) == ["", "", ""]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", ["empty", "missing", "file", "mark of another start"])
def test_a_node_with_a_folder_of_its_own_is_refused_and_named(tmp_path: Path, other: str) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    if other == "file":
        own.write_text("")
    elif other != "missing":
        own.mkdir()
    if other == "mark of another start":
        (own / ".shared-0123456789abcdef").write_text(".shared-0123456789abcdef")
    first, second, third = run_ranks(on_nodes, 3, shared, own, shared)
    assert first == third == "RemoteError: a rank on another node ended the run; see the log of that node for the reason"
    assert second.startswith(f"ConfigError: {own} on this node (")
    assert "is not the run folder of rank 0" in second
    assert "mount it at the same path on every node, and name it with --run" in second
    assert list(shared.iterdir()) == []


def where_the_folder_is_seen_late(group: Group, shared: Path, late: Path) -> str:
    """Check with a second node that sees the folder after its first look, as NFS may let it."""
    if group.rank == 1:
        shared_folders.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: late.symlink_to(shared))  # type: ignore[assignment]
    return on_nodes(group, shared, late)


def test_a_node_that_sees_the_folder_late_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    assert run_ranks(where_the_folder_is_seen_late, 2, tmp_path / "shared", tmp_path / "late") == ["", ""]


def where_names_repeat(group: Group, *folders: Path) -> str:
    shared_folders.secrets = SimpleNamespace(token_hex=lambda num_bytes: "ab" * num_bytes)  # type: ignore[assignment]
    return on_nodes(group, *folders)


def test_a_file_of_that_name_with_another_content_is_not_the_file_of_rank_0(tmp_path: Path) -> None:
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / ".shared-abababababababab").write_text("")
    first, second = run_ranks(where_names_repeat, 2, tmp_path / "shared", tmp_path / "own")
    assert first.startswith("RemoteError: ")
    assert "(it has another content here)" in second


def test_every_start_writes_a_file_of_a_new_name_and_removes_nothing_but_such_files(tmp_path: Path) -> None:
    kept = [tmp_path / name for name in (".shared-notes", ".shared-0123456789abcdeg", ".shared-0123456789abcdef0")]
    for file in kept:
        file.write_text("")
    names = {shared_folders._write_mark(tmp_path) for _ in range(3)}
    assert len(names) == 3
    assert len(names & {path.name for path in tmp_path.iterdir()}) == 1
    assert all(file.exists() for file in kept)


def same_data(group: Group, *digests: str) -> str:
    try:
        check_same_data(Path("/data"), digests[group.rank], replace(group, local_rank=0, local_world_size=1))
    except ProjectError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_node_with_other_data_is_refused_and_named() -> None:
    assert run_ranks(same_data, 2, "sha256:a", "sha256:a") == ["", ""]
    first, second = run_ranks(same_data, 2, "sha256:a", "sha256:b")
    assert first.startswith("RemoteError: a rank on another node")
    assert second.startswith("PreparedDataError: /data: on this node (")
    assert "the root digest is sha256:b, but on the node of rank 0 it is sha256:a" in second


def on_one_node(group: Group, run: Path) -> bool:
    check_shared(run, group)
    check_same_data(run, f"{group.rank}", group)
    return True


def test_on_one_node_nothing_is_written(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert run_ranks(on_one_node, 2, missing) == [True, True]
    assert not missing.exists()
