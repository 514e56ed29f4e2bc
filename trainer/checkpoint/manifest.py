"""A checkpoint's manifest: sealed canonical JSON that says what is saved and in which files; reading it believes nothing.

format   3
step     the step that the state belongs to
objects  name of an object file (the sha256 of its bytes) -> its size
tensors  "model/<weight>", "optimizer/<weight>/<kind>", "average/<weight>" -> object, sha256 of the numbers, dtype, shape, bytes
state    counters and whatever else is plain data
seal     sha256 over all of this
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.files import sealed, unsealed
from trainer.checkpoint.tensor_file import TensorSpec

__all__ = [
    "FORMAT",
    "MAX_MANIFEST_BYTES",
    "CheckpointManifest",
    "OtherFormatError",
    "StoredTensor",
    "encode_manifest",
    "parse_manifest",
]

FORMAT = 3
"""Another number whenever a manifest, or the state in it, gets another layout."""
MAX_MANIFEST_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = {"format", "step", "objects", "tensors", "state"}


class OtherFormatError(ValueError):
    """Another version of this program wrote it, which is no damage."""


@dataclass(frozen=True)
class StoredTensor:
    """Where the numbers of a tensor are."""

    object: str
    """The object file that holds it, under its own name."""
    sha256: str
    """Of its numbers."""
    spec: TensorSpec


@dataclass(frozen=True)
class CheckpointManifest:
    """All that a checkpoint consists of."""

    step: int
    objects: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, Any]


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """The file's content.

    Raises:
        ValueError, TypeError: the state holds what JSON has no word for.
    """
    tensors = {
        name: {
            "object": stored.object,
            "sha256": stored.sha256,
            "dtype": stored.spec.dtype,
            "shape": list(stored.spec.shape),
            "bytes": stored.spec.num_bytes,
        }
        for name, stored in manifest.tensors.items()
    }
    return sealed(
        {
            "format": FORMAT,
            "step": manifest.step,
            "objects": dict(manifest.objects),
            "tensors": tensors,
            "state": dict(manifest.state),
        }
    )


def parse_manifest(data: bytes) -> CheckpointManifest:
    """The manifest in a file's content.

    Raises:
        OtherFormatError: it is as it was written, in another format.
        ValueError: it was changed since it was written, or it says what no manifest can say.
    """
    try:
        content = unsealed(data)
        found = content.get("format")
        if _length(found) != FORMAT:
            raise OtherFormatError(
                f"it has format {found} of checkpoints, this version of the program reads {FORMAT}; use the version that wrote it"
            )
        if content.keys() != _KEYS:
            raise ValueError(f"fields {', '.join(sorted(content))}")
        objects = {_digest(name): _length(num_bytes) for name, num_bytes in content["objects"].items()}
        tensors = {name: _stored(name, entry) for name, entry in content["tensors"].items()}
        if not isinstance(content["state"], dict):
            raise ValueError("its state is not an object")
        if objects.keys() != {stored.object for stored in tensors.values()}:
            raise ValueError("its objects are not those that its tensors name")
        return CheckpointManifest(_length(content["step"]), objects, tensors, content["state"])
    except OtherFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a checkpoint's manifest as it was written ({error})") from None


def _stored(name: str, entry: Mapping[str, Any]) -> StoredTensor:
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    if _length(entry["bytes"]) != spec.num_bytes:
        raise ValueError(f"tensor {name!r} of {entry['dtype']} {entry['shape']} claims {entry['bytes']} bytes")
    return StoredTensor(_digest(entry["object"]), _digest(entry["sha256"]), spec)


def _digest(value: Any) -> str:
    """A digest, and nothing else, becomes part of a path."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256 in hexadecimal")
    return value


def _length(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no whole number from 0 on")
    return value
