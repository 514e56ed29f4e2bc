"""Compares an exported directory with its record, and with the run that it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from common.errors import CheckpointError
from common.files import read_input
from trainer.checkpoint.tensor_file import decode_tensors, same_bytes
from trainer.checkpoint.weights import weights_digest
from trainer.exchange.adapters import adapter_files, adapter_tensors
from trainer.exchange.export_record import EXPORT_RECORD, check_files, foreign_entries, read_export_record
from trainer.exchange.hugging_face import DTYPES, INDEX, described_files, tensors_in
from trainer.exchange.source import ExportSource, open_source

__all__ = ["describe_export", "verify_export"]

_TENSORS = ".safetensors"
_NAMED_FILES = 20
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
    found: dict[str, Tensor] = {}
    for name in sorted(name for name in record["files"] if name.endswith(_TENSORS)):
        tensors = _read_tensors(directory, name, record)
        if source is not None and (tensor := _first_difference(tensors, name, source, record)):
            raise CheckpointError(f"{directory / name}: the tensor {tensor} differs from the checkpoint of the run; {_WRITE_AGAIN}")
        found |= tensors if source is None and record["dtype"] == "fp32" else {}
    if found and record["kind"] != "peft" and weights_digest(found) != record["weights"]:
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
        if name not in record["files"] or read_input(directory / name, len(content) + 1, below=directory) != content:
            raise CheckpointError(
                f"{directory / name}: an export of {source.run} writes another file; it was changed, or another version of this "
                f"program wrote it: {_WRITE_AGAIN}"
            )


def _changed_tensor(directory: Path, name: str, source: ExportSource, record: Mapping[str, Any]) -> str | None:
    try:
        return _first_difference(_read_tensors(directory, name, record), name, source, record)
    except CheckpointError:
        return None


def _read_tensors(directory: Path, name: str, record: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        return decode_tensors(bytearray(read_input(directory / name, record["files"][name]["bytes"], below=directory)))
    except ValueError as error:
        raise CheckpointError(f"{directory / name}: {error}; {_WRITE_AGAIN}") from None


def _first_difference(tensors: Mapping[str, Tensor], file_name: str, source: ExportSource, record: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor of a file whose bits are not those of the checkpoint in the type of the export."""
    shards = adapter_tensors(source) if record["kind"] == "peft" else tensors_in(source.weights, record["dtype"])
    expected = shards.get(file_name, {})
    for name in sorted({*expected, *tensors}):
        if name not in expected or name not in tensors or not same_bytes(tensors[name], expected[name].to(DTYPES[record["dtype"]])):
            return name
    return None
