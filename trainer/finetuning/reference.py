"""The frozen copy of the initial weights that some tasks compare the trained model with.

A run keeps these weights in one file, because the run that they come from may be removed. The record of the run has their digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from common.errors import CheckpointError
from common.files import UnusableFileError, open_input, own_folder, unfinished_path
from trainer.checkpoint.tensor_file import decode_tensors, encode_header, raw_bytes, spec_of
from trainer.checkpoint.weights import weights_digest
from trainer.runs.directory import REFERENCE

__all__ = ["read_reference", "write_reference"]


def write_reference(run: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the initial weights of a run into its folder, atomically and durably."""
    own_folder((run / REFERENCE).parent)
    header, names = encode_header({name: spec_of(tensor) for name, tensor in weights.items()})
    temporary = unfinished_path(run / REFERENCE)
    try:
        with temporary.open("xb") as file:
            file.write(header)
            for name in names:
                file.write(raw_bytes(weights[name]))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(run / REFERENCE)
    finally:
        temporary.unlink(missing_ok=True)


def read_reference(run: Path, digest: str) -> Mapping[str, Tensor]:
    """Return the initial weights of a run by name, on the CPU.

    Args:
        run: its folder.
        digest: digest of the weights in its record.

    Raises:
        CheckpointError: the file is missing or damaged, or has other weights.
    """
    path = run / REFERENCE
    remedy = "restore it from a copy, or begin a new run with --init"
    try:
        with open_input(path, below=run) as file:
            weights = decode_tensors(bytearray(file.read()))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the initial weights are missing, and objective = preference needs them; {remedy}") from None
    except (ValueError, UnusableFileError, OSError) as error:
        raise CheckpointError(f"{path}: the initial weights cannot be read ({error}); {remedy}") from None
    if (found := weights_digest(weights)) != digest:
        raise CheckpointError(f"{path}: the weights have the digest {found}, and the run began with {digest}; {remedy}")
    return weights
