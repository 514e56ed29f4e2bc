"""Exported directories: written complete or not at all, recorded in `export.json` with the digests of all files, and verified."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import torch
from pydantic import Field

from common.errors import CheckpointError, ConfigError
from common.files import UnusableFileError, digest_bytes, digest_file, digest_stream, open_input, read_input, sealed, unsealed
from common.paths import VERSION
from common.targets import new_folder
from common.untrusted import Count, Schema, parsed
from trainer.checkpoint.tensor_file import read_specs, read_tensor, same_bytes, spec_of, write_tensor_file
from trainer.interop import Dtype, FormatName
from trainer.interop.formats import DTYPES, ExportFormat
from trainer.interop.weight_layouts import EMBEDDING, OWN_NORM
from trainer.model.saved_decoder import SavedDecoder, open_decoder
from trainer.runs.manifest import FORMAT as CHECKPOINT_FORMAT
from trainer.runs.manifest import TensorSpec
from trainer.runs.saved_run import SavedRun

EXPORT_RECORD = "export.json"
_MAX_BYTES = 1 << 20
_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
_TENSORS = ".safetensors"
_NAMED_FILES = 20
_REPLACE = "write it again with `trainer export --replace`, or restore it from a copy"


class _File(Schema):
    sha256: _Digest
    bytes: Count


class _Tokenizer(Schema):
    kind: str
    digest: _Digest
    exact: bool  # whether it was checked to give the same ids


class ExportRecord(Schema):
    format: Literal[1] = 1  # increases whenever the meaning of a field changes
    kind: FormatName
    dtype: Dtype
    step: Count
    checkpoint: _Digest
    average: bool
    weights: _Digest
    data: _Digest | None
    tokenizer: _Tokenizer
    files: dict[_FileName, _File]


def format_named(kind: FormatName) -> ExportFormat:
    found: ExportFormat = import_module(f"trainer.interop.formats.{kind}").FORMAT
    return found


def write_export(
    source: SavedDecoder, output: Path, *, kind: FormatName, dtype: Dtype, replace: bool = False, exact: bool = True
) -> None:
    """Write a directory complete or not at all. `exact`: refuse a tokenizer that would give other ids for some texts."""
    with new_folder(output, replaces=True) as folder:
        write_files(source, folder, format_named(kind), dtype, exact=exact)
        files = {path.name: {"sha256": digest_file(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
        record = ExportRecord.model_validate(
            {
                "kind": kind,
                "dtype": dtype,
                **_origin(source),
                "tokenizer": {"kind": source.tokenizer.kind, "digest": source.tokenizer.digest, "exact": exact},
                "versions": {"program": VERSION, "checkpoint_format": CHECKPOINT_FORMAT},
                "files": files,
            }
        )
        (folder / EXPORT_RECORD).write_bytes(sealed(record.model_dump()))
        check_output(output, replace=replace)


def write_files(source: SavedDecoder, folder: Path, form: ExportFormat, dtype: Dtype, *, exact: bool = True) -> None:
    form.check(source, dtype)
    files = form.described(source, dtype, exact)
    if form.card is not None:
        files["README.md"] = form.card(source, dtype)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for name, shard in form.tensors(source, dtype).items():
        write_tensor_file(folder / name, shard, DTYPES[dtype], {"format": "pt"})
    if form.write_graphs is not None:
        form.write_graphs(source, folder)


def check_output(output: Path, *, replace: bool) -> None:
    """Raise ConfigError unless the directory does not exist, is empty, or has an earlier export that may be replaced."""
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ConfigError(f"--output {output} is a {'link' if output.is_symlink() else 'file'}; name a new or empty directory")
    if not output.exists() or not any(output.iterdir()):
        return
    try:
        record = read_export_record(output)
    except CheckpointError:
        raise ConfigError(f"--output {output} is not empty and has no earlier export; name a new or empty directory") from None
    if foreign := foreign_entries(output, record):
        raise ConfigError(
            f"--output {output} has {foreign[0]!r}, which an export did not write, so it is not replaced; name another directory"
        )
    if not replace:
        raise ConfigError(f"--output {output} has an export of step {record.step}; add --replace, or name another directory")


def read_export_record(directory: Path) -> ExportRecord:
    path = directory / EXPORT_RECORD
    try:
        values = unsealed(read_input(path, _MAX_BYTES, below=directory))
        return parsed(ExportRecord, values)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{directory}: no {EXPORT_RECORD}, so this is not an exported directory; name one that `trainer export` wrote"
        ) from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; {_REPLACE}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: the file was changed ({error}); {_REPLACE}") from None


def _check_files(directory: Path, record: ExportRecord, source: SavedDecoder | None) -> None:
    """Compare the digest of every file. With `source` the error names the first tensor that differs."""
    for name, entry in sorted(record.files.items()):
        path = directory / name
        try:
            with open_input(path, below=directory) as file:
                if os.fstat(file.fileno()).st_size == entry.bytes and digest_stream(file) == entry.sha256:
                    continue
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing, but {EXPORT_RECORD} names it; {_REPLACE}") from None
        except UnusableFileError as error:
            raise CheckpointError(f"{error}; {_REPLACE}") from None
        tensor = None
        if source is not None and name.endswith(_TENSORS):
            with suppress(CheckpointError):
                tensor = _first_difference(directory, name, source, record)
        where = "" if tensor is None else f"; the first tensor that differs from the run is {tensor}"
        raise CheckpointError(f"{path}: the digest of its bytes is not that in {EXPORT_RECORD}{where}; {_REPLACE}")


def foreign_entries(directory: Path, record: ExportRecord) -> list[str]:
    own = {EXPORT_RECORD, *record.files}
    return sorted(path.name for path in directory.iterdir() if path.name not in own or path.is_symlink() or not path.is_file())


def verify_export(directory: Path, run: Path | None = None) -> dict[str, Any]:
    """Return the facts that `verify --json` prints.

    Without a run it checks the seal of `export.json`, the digest of every file, and for a whole model in fp32 that of the weights.
    With a run it also compares names, tensors and descriptions with those that an export writes today.
    """
    record = read_export_record(directory)
    source = None if run is None else open_decoder(SavedRun(run), str(record.step))
    _check_files(directory, record, source)
    if source is not None:
        _check_source(directory, record, source)
    names = sorted(name for name in record.files if name.endswith(_TENSORS))
    for name in names:
        if source is None:
            with _opened(directory / name):  # its header is checked
                continue
        if tensor := _first_difference(directory, name, source, record):
            raise CheckpointError(f"{directory / name}: the tensor {tensor} differs from the checkpoint of the run; {_REPLACE}")
    is_whole = source is None and names and record.dtype == "fp32" and format_named(record.kind).holds_all_weights
    if is_whole and _weights_digest(directory, names) not in (None, record.weights):
        raise CheckpointError(f"{directory}: its weights are not those that {EXPORT_RECORD} names; {_REPLACE}")
    return {
        "kind": record.kind,
        "step": record.step,
        "files": len(record.files),
        "weights": record.weights,
        "data": record.data,
        "tokenizer": record.tokenizer.digest,
        "compared_with_run": run is not None,
        "foreign": foreign_entries(directory, record),
    }


def describe_export(facts: Mapping[str, Any]) -> str:
    has_graphs = format_named(facts["kind"]).write_graphs is not None
    compared = (
        f"{'' if has_graphs else 'all tensors, '}the tokenizer and the settings are those of the run"
        if facts["compared_with_run"]
        else "not compared with a run; `trainer verify RUN --export DIR` does so"
    )
    names = [name if name.isprintable() else ascii(name) for name in facts["foreign"][:_NAMED_FILES]]
    foreign = f"\n  files that the export did not write: {', '.join(names)}" if names else ""
    return f"export       step {facts['step']}, {facts['files']} files are unchanged; {compared}{foreign}"


def _origin(source: SavedDecoder) -> dict[str, Any]:
    return {
        "step": source.step,
        "checkpoint": source.manifest_digest,
        "average": source.is_average,
        "weights": source.weights_digest,
        "data": source.data_digest,
    }


def _check_source(directory: Path, record: ExportRecord, source: SavedDecoder) -> None:
    found = record.model_dump() | {"tokenizer": record.tokenizer.digest}
    for name, value in (_origin(source) | {"tokenizer": source.tokenizer.digest}).items():
        if found[name] != value:
            raise CheckpointError(
                f"{directory / EXPORT_RECORD}: {name} is {found[name]}, but {value} at step {source.step} of {source.run}; "
                "name the run that was exported, or restore the files that were changed"
            )
    for name, content in format_named(record.kind).described(source, record.dtype, record.tokenizer.exact).items():
        entry = record.files.get(name)
        if entry is None or (entry.bytes, entry.sha256) != (len(content), digest_bytes(content)):
            raise CheckpointError(
                f"{directory / name}: an export of {source.run} writes another file; it was changed, or another version of this "
                f"program wrote it: {_REPLACE}"
            )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Mapping[str, TensorSpec]]]:
    try:
        with open_input(path, below=path.parent) as file:
            yield file, read_specs(file, os.fstat(file.fileno()).st_size)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; {_REPLACE}") from None


def _weights_digest(directory: Path, names: Sequence[str]) -> str | None:
    """Return the digest over the tensors of all files, sorted by name, as `trainer.checkpoint.of_run` computes it for fp32.

    None for a GPT-2 or Gemma, whose tensors have other names and forms than in the checkpoint.
    """
    places: dict[str, tuple[Path, int, int]] = {}
    for path in (directory / name for name in names):
        with _opened(path) as (file, specs):
            offset = file.tell()
            for name, spec in specs.items():
                places[name] = path, offset, spec.num_bytes
                offset += spec.num_bytes
    if EMBEDDING in places or any(name.endswith(OWN_NORM) for name in places):
        return None
    digest = hashlib.sha256()
    for _, (path, offset, num_bytes) in sorted(places.items()):
        with open_input(path, below=directory) as file:
            file.seek(offset)
            digest.update(file.read(num_bytes))
    return f"sha256:{digest.hexdigest()}"


def _first_difference(directory: Path, file_name: str, source: SavedDecoder, record: ExportRecord) -> str | None:
    """Return the first tensor of a file whose bits are not those of the checkpoint. One tensor is in memory at a time."""
    expected = format_named(record.kind).tensors(source, record.dtype).get(file_name, {})
    dtype = DTYPES[record.dtype]
    wanted = {name: spec_of(torch.empty_like(tensor, dtype=dtype, device="meta")) for name, tensor in expected.items()}
    with _opened(directory / file_name) as (file, specs):
        if other := sorted(name for name in {*wanted, *specs} if wanted.get(name) != specs.get(name)):
            return other[0]
        return next(
            (name for name, spec in specs.items() if not same_bytes(read_tensor(file, spec), expected[name].to(dtype))), None
        )
