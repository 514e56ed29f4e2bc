"""Shards that a rank cannot read: how all ranks learn about them, and which of them are left out.

W ranks   S shards of the prepared data, of both splits
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.errors import PreparedDataError, ProjectError, StorageError, exit_code_of
from common.storage_errors import explain_os_error
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import ShardError
from trainer.config import DataErrorsConfig
from trainer.distributed.group import Group, RemoteError
from trainer.runs.adjustments import Adjustment


def shared_faults(faults: Mapping[str, ProjectError], manifest: Manifest, group: Group) -> dict[str, tuple[int, int]]:
    """Return the shards that any rank cannot read, with the lowest such rank and its exit code. All ranks must call this."""
    paths = [shard.path for shard in manifest.shards]
    codes_WS = torch.zeros((group.world_size, len(paths)), dtype=torch.int64)
    for path, error in faults.items():
        codes_WS[group.rank, paths.index(path)] = int(exit_code_of(error))
    codes_WS = group.sum(codes_WS.to(group.device)).cpu()
    found = {}
    for rank, place in reversed(codes_WS.nonzero().tolist()):
        found[paths[place]] = (rank, int(codes_WS[rank, place]))
    return dict(sorted(found.items()))


def decide(
    found: Mapping[str, tuple[int, int]],
    faults: Mapping[str, ProjectError],
    config: DataErrorsConfig,
    manifest: Manifest,
    group: Group,
    *,
    step: int,
    known: frozenset[str],
) -> Adjustment:
    """Return the quarantine of `found`. If the policy ends the training, one rank raises its error, the others one without text."""
    if config.policy == "stop":
        path, (rank, code) = next(iter(found.items()))
        if rank != group.rank:
            raise RemoteError(code, same_node=group.has_here(rank))
        raise faults[path]
    for split in ("train", "val"):
        rows = {shard.path: shard.rows for shard in manifest.shards if shard.split == split}
        lost = [path for path in rows if path in found or path in known]
        num_lost, num_rows = sum(rows[path] for path in lost), sum(rows.values())
        if num_lost > config.max_share * num_rows:
            raise PreparedDataError(
                f"{', '.join(lost)}: shards that cannot be read hold {num_lost} of {num_rows} {split} rows, and "
                f"data_errors.max_share = {config.max_share:g} allows only "
                f"{int(config.max_share * num_rows)}; restore the shards, run `prepare` again, or raise data_errors.max_share"
            )
    ranks = ", ".join(str(rank) for rank in sorted({rank for rank, _ in found.values()}))
    reason = f"rank {ranks} could not read {'them' if len(found) > 1 else 'it'}"
    return Adjustment(step=step, reason=reason, shards=tuple(found))


def as_project_error(error: ShardError | OSError) -> ProjectError:
    if isinstance(error, ShardError):
        return error
    return StorageError(explain_os_error(error))
