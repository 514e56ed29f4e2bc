"""Compares an exported directory with its record, and with the run that it comes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from common.errors import CheckpointError
from common.files import digest_bytes, open_input
from trainer.checkpoint.tensor_file import read_specs, read_tensor, same_bytes, spec_of
from trainer.interop.adapters import adapter_files, adapter_tensors
from trainer.interop.export_record import EXPORT_RECORD, check_files, foreign_entries, read_export_record
from trainer.interop.hugging_face import DTYPES, INDEX, described_files, tensors_in
from trainer.interop.source import ExportSource, open_source
from trainer.runs.manifest import TensorSpec

__all__ = ["describe_export", "verify_export"]

_TENSORS = ".safetensors"
_NAMED_FILES = 20
_READ_BYTES = 1 << 20
_WRITE_AGAIN = "write it again with `trainer export --replace`, or restore it from a copy"


def verify_export(directory: Path, run: Path | None = None) -> dict[str, Any]:
    """Check an exported directory, and return the facts that `verify --json` prints.

    Without a run: the seal of `export.json`, the digest of every file, and for a whole model in fp32 the digest of the weights.
    With a run also: the checkpoint, data and tokenizer that `export.json` names are those of the run, each tensor has the bits of
    the checkpoint after the conversion to its type, and the files that describe model and tokenizer are those that an export
    writes today.

    Raises:
        CheckpointError: something differs; the message names the first file, or the first tensor of a file.
    """
    record = read_export_record(directory)
    changed = check_files(directory, record)
    source = None if run is None else open_source(run, str(record["step"]))
    if changed is not None:
        tensor = _changed_tensor(directory, changed, source, record) if source is not None and changed.endswith(_TENSORS) else None
        where = "" if tensor is None else f"; the first tensor that differs from the run is {tensor}"
        raise CheckpointError(
            f"{directory / changed}: the digest of its bytes is not that in {EXPORT_RECORD}{where}; {_WRITE_AGAIN}"
        )
    if source is not None:
        _check_origin(directory, record, source)
        _check_described(directory, record, source)
    names = sorted(name for name in record["files"] if name.endswith(_TENSORS))
    for name in names:
        if source is None:
            with _opened(directory / name):  # its header is checked
                continue
        if tensor := _first_difference(directory, name, source, record):
            raise CheckpointError(f"{directory / name}: the tensor {tensor} differs from the checkpoint of the run; {_WRITE_AGAIN}")
    is_whole = source is None and names and record["dtype"] == "fp32" and record["kind"] != "peft"
    if is_whole and _weights_digest(directory, names) != record["weights"]:
        raise CheckpointError(f"{directory}: its weights are not those that {EXPORT_RECORD} names; {_WRITE_AGAIN}")
    return {
        "kind": record["kind"],
        "step": record["step"],
        "files": len(record["files"]),
        "weights": record["weights"],
        "data": record["data"],
        "tokenizer": record["tokenizer"]["digest"],
        "compared_with_run": run is not None,
        "foreign": foreign_entries(directory, record),
    }


def describe_export(facts: Mapping[str, Any]) -> str:
    """Return the facts of `verify_export` as text."""
    compared = (
        f"{'' if facts['kind'] == 'onnx' else 'all tensors, '}the tokenizer and the settings are those of the run"
        if facts["compared_with_run"]
        else "not compared with a run; `trainer verify RUN --export DIR` does so"
    )
    names = [name if name.isprintable() else ascii(name) for name in facts["foreign"][:_NAMED_FILES]]
    foreign = f"\n  files that the export did not write: {', '.join(names)}" if names else ""
    return f"export       step {facts['step']}, {facts['files']} files are unchanged; {compared}{foreign}"


def _check_origin(directory: Path, record: Mapping[str, Any], source: ExportSource) -> None:
    expected = {
        "checkpoint": source.manifest_digest,
        "average": source.is_average,
        "weights": source.weights_digest,
        "data": source.data_digest,
        "tokenizer": source.tokenizer.digest,
    }
    found = dict(record) | {"tokenizer": record["tokenizer"]["digest"]}
    for name, value in expected.items():
        if found[name] != value:
            raise CheckpointError(
                f"{directory / EXPORT_RECORD}: {name} is {found[name]}, but {value} at step {source.step} of {source.run}; "
                "name the run that was exported, or restore the files that were changed"
            )


def _check_described(directory: Path, record: Mapping[str, Any], source: ExportSource) -> None:
    described = adapter_files if record["kind"] == "peft" else described_files
    for name, content in described(source, record["dtype"], exact=record["tokenizer"]["exact"]).items():
        if name == INDEX and record["kind"] != "hf":
            continue
        entry = record["files"].get(name)
        if entry is None or (entry["bytes"], entry["sha256"]) != (len(content), digest_bytes(content)):
            raise CheckpointError(
                f"{directory / name}: an export of {source.run} writes another file; it was changed, or another version of this "
                f"program wrote it: {_WRITE_AGAIN}"
            )


def _changed_tensor(directory: Path, name: str, source: ExportSource, record: Mapping[str, Any]) -> str | None:
    try:
        return _first_difference(directory, name, source, record)
    except CheckpointError:
        return None


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Mapping[str, TensorSpec]]]:
    """Yield a tensor file behind its header, and its tensors in their order."""
    try:
        with open_input(path, below=path.parent) as file:
            yield file, read_specs(file, os.fstat(file.fileno()).st_size)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_WRITE_AGAIN}") from None


def _weights_digest(directory: Path, names: Sequence[str]) -> str:
    """Return the digest over the tensors of all files, sorted by name, as `trainer.checkpoint.weights` computes it for fp32."""
    places: dict[str, tuple[Path, int, int]] = {}
    for path in (directory / name for name in names):
        with _opened(path) as (file, specs):
            offset = file.tell()
            for name, spec in specs.items():
                places[name] = path, offset, spec.num_bytes
                offset += spec.num_bytes
    digest = hashlib.sha256()
    for path, offset, num_bytes in (place for _, place in sorted(places.items())):
        with open_input(path, below=directory) as file:
            file.seek(offset)
            left = num_bytes
            while left and (chunk := file.read(min(left, _READ_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    return f"sha256:{digest.hexdigest()}"


def _first_difference(directory: Path, file_name: str, source: ExportSource, record: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor of a file whose bits are not those of the checkpoint in the type of the export.

    One tensor is in memory at a time, and none that the checkpoint does not have with the same type and shape.
    """
    shards = adapter_tensors(source) if record["kind"] == "peft" else tensors_in(source.weights, record["dtype"])
    expected, dtype = shards.get(file_name, {}), DTYPES[record["dtype"]]
    wanted = {name: spec_of(torch.empty_like(tensor, dtype=dtype, device="meta")) for name, tensor in expected.items()}
    with _opened(directory / file_name) as (file, specs):
        if other := sorted(name for name in {*wanted, *specs} if wanted.get(name) != specs.get(name)):
            return other[0]
        return next(
            (name for name, spec in specs.items() if not same_bytes(read_tensor(file, spec), expected[name].to(dtype))), None
        )
