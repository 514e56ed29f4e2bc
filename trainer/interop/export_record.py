"""`export.json` of an exported directory: sealed canonical JSON with the digests of all files and where the model comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from common.errors import CheckpointError
from common.files import UnusableFileError, digest_file, digest_stream, open_input, read_input, sealed, unsealed
from common.paths import VERSION
from common.untrusted import Count, Form, check_form
from trainer.checkpoint.manifest import FORMAT as CHECKPOINT_FORMAT
from trainer.interop.source import ExportSource

__all__ = ["EXPORT_RECORD", "check_files", "export_record", "foreign_entries", "read_export_record"]

EXPORT_RECORD = "export.json"
_FORMAT = 1
"""Increases whenever the meaning of a field changes."""
_MAX_BYTES = 1 << 20
_DIGEST = r"sha256:[0-9a-f]{64}"
_Digest = Annotated[str, Field(pattern=rf"^{_DIGEST}$")]
_FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
_WRITE_AGAIN = "write the directory again with `trainer export`, or restore it from a copy"


def export_record(source: ExportSource, folder: Path, *, kind: str, dtype: str, exact: bool) -> bytes:
    """Return the content of the record for the files in a folder.

    Args:
        source: the checkpoint that was exported.
        folder: has all other files of the export.
        kind: format of the export, such as `hf`.
        dtype: type of the weights in the files.
        exact: whether the tokenizer was checked to give the same ids.
    """
    files = {path.name: {"sha256": digest_file(path), "bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    return sealed(
        {
            "format": _FORMAT,
            "kind": kind,
            "dtype": dtype,
            "step": source.step,
            "checkpoint": source.manifest_digest,
            "average": source.is_average,
            "weights": source.weights_digest,
            "data": source.data_digest,
            "tokenizer": {"kind": source.tokenizer.kind, "digest": source.tokenizer.digest, "exact": exact},
            "versions": {"program": VERSION, "checkpoint_format": CHECKPOINT_FORMAT},
            "files": files,
        }
    )


class _FileForm(Form):
    sha256: _Digest
    bytes: Count


class _TokenizerForm(Form):
    kind: str
    digest: _Digest
    exact: bool


class _RecordForm(Form):
    format: Literal[1]
    kind: str
    dtype: Literal["fp32", "bf16"]
    step: Count
    checkpoint: _Digest
    average: bool
    weights: _Digest
    data: _Digest | None
    tokenizer: _TokenizerForm
    files: dict[_FileName, _FileForm]


def read_export_record(directory: Path) -> dict[str, Any]:
    """Return the record of an exported directory.

    Raises:
        CheckpointError: there is none, or it was changed.
        OSError: it cannot be read.
    """
    path = directory / EXPORT_RECORD
    try:
        record = unsealed(read_input(path, _MAX_BYTES, below=directory))
        check_form(_RecordForm, record)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{directory}: no {EXPORT_RECORD}, so this is not an exported directory; name one that `trainer export` wrote"
        ) from None
    except UnusableFileError as error:
        raise CheckpointError(f"{error}; {_WRITE_AGAIN}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: the file was changed ({error}); {_WRITE_AGAIN}") from None
    return record


def check_files(directory: Path, record: Mapping[str, Any]) -> str | None:
    """Return the name of the first file whose bytes differ from the record, None if there is none.

    Raises:
        CheckpointError: a file is missing, or is not a regular file.
        OSError: a file cannot be read.
    """
    for name, entry in sorted(record["files"].items()):
        path = directory / name
        try:
            with open_input(path, below=directory) as file:
                if os.fstat(file.fileno()).st_size != entry["bytes"] or digest_stream(file) != entry["sha256"]:
                    return str(name)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: missing, but {EXPORT_RECORD} names it; {_WRITE_AGAIN}") from None
        except UnusableFileError as error:
            raise CheckpointError(f"{error}; {_WRITE_AGAIN}") from None
    return None


def foreign_entries(directory: Path, record: Mapping[str, Any]) -> list[str]:
    """Return the names of files, folders and links in a directory that the export did not write, sorted."""
    own = {EXPORT_RECORD, *record["files"]}
    return sorted(path.name for path in directory.iterdir() if path.name not in own or path.is_symlink() or not path.is_file())
