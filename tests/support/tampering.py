"""Prepared data that a stranger has changed and given matching digests, so that only a check of the values can find the change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from common.files import canonical_json, digest_bytes, digest_file


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change values of a manifest, and recompute its root digest."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    change(manifest)
    (folder / "manifest.json").write_bytes(sealed_again(manifest))


def sealed_again(manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest with these values and the matching root digest."""
    content = {name: value for name, value in manifest.items() if name != "root_digest"}
    return canonical_json({**content, "root_digest": digest_bytes(canonical_json(content))})


def with_value(place: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets the value at a path such as `shards.0.rows`."""

    def change(manifest: dict[str, Any]) -> None:
        *parents, last = place.split(".")
        target: Any = manifest
        for name in parents:
            target = target[int(name) if isinstance(target, list) else name]
        target[int(last) if isinstance(target, list) else last] = value

    return change


def rewrite_table(folder: Path, name: str, change: Callable[[pa.Table], pa.Table], compression: str | None = None) -> None:
    """Change an Arrow file of prepared data, and write its new size and digest into the manifest."""
    path = folder / name
    table = change(pa.ipc.open_file(pa.memory_map(str(path))).read_all()).combine_chunks()
    path.unlink()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)

    def name_it(manifest: dict[str, Any]) -> None:
        for shard in manifest["shards"]:
            if shard["path"] == name:
                shard.update(bytes=path.stat().st_size, sha256=digest_file(path))
        if name in manifest["files"]:
            manifest["files"][name] = digest_file(path)

    reseal(folder, name_it)
