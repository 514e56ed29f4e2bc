"""The manifest of a checkpoint: sealed canonical JSON with all tensors and their files. A reader checks every value.

format   3
step     the step of the saved state
objects  name of an object file (the sha256 of its bytes) -> its size in bytes
tensors  "model/<weight>", "optimizer/<weight>/<kind>", "average/<weight>" -> object, sha256 of the numbers, dtype, shape, bytes
state    counters and other plain data
seal     sha256 over all fields above
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
"""Increases whenever the layout of the manifest, or of the state in it, changes."""
MAX_MANIFEST_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYS = {"format", "step", "objects", "tensors", "state"}


class OtherFormatError(ValueError):
    """Another version of this program wrote the manifest. This is not damage."""


@dataclass(frozen=True)
class StoredTensor:
    """The place and the digest of a stored tensor."""

    object: str
    """Name of the object file. The tensor has the same name there as in the manifest."""
    sha256: str
    """Digest of the raw values of the tensor."""
    spec: TensorSpec


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a manifest."""

    step: int
    objects: Mapping[str, int]
    tensors: Mapping[str, StoredTensor]
    state: Mapping[str, Any]


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the content of the manifest file.

    Raises:
        ValueError, TypeError: the state contains a value that JSON cannot represent.
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
    content = {"format": FORMAT, "step": manifest.step, "objects": dict(manifest.objects), "tensors": tensors}
    return sealed(content | {"state": dict(manifest.state)})


def parse_manifest(data: bytes) -> CheckpointManifest:
    """Return the manifest in the content of a file.

    Raises:
        OtherFormatError: the manifest is undamaged, but has another format.
        ValueError: the manifest was changed since it was written, or contains invalid values.
    """
    try:
        content = unsealed(data)
        found = content.get("format")
        if _length(found) != FORMAT:
            raise OtherFormatError(
                f"it has format {found} of checkpoints, and this program reads {FORMAT}; use the version that wrote it"
            )
        if content.keys() != _KEYS:
            raise ValueError(f"fields {', '.join(sorted(content))}")
        objects = {_digest(name): _length(num_bytes) for name, num_bytes in content["objects"].items()}
        tensors = {name: _stored(name, entry) for name, entry in content["tensors"].items()}
        if not isinstance(content["state"], dict):
            raise ValueError("its state is not an object")
        if objects.keys() != {stored.object for stored in tensors.values()}:
            raise ValueError("its objects differ from those that its tensors name")
        return CheckpointManifest(_length(content["step"]), objects, tensors, content["state"])
    except OtherFormatError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest is damaged or was changed ({error})") from None


def _stored(name: str, entry: Mapping[str, Any]) -> StoredTensor:
    spec = TensorSpec(entry["dtype"], tuple(entry["shape"]))
    if _length(entry["bytes"]) != spec.num_bytes:
        raise ValueError(f"tensor {name!r} of {entry['dtype']} {entry['shape']} claims {entry['bytes']} bytes")
    return StoredTensor(_digest(entry["object"]), _digest(entry["sha256"]), spec)


def _digest(value: Any) -> str:
    """Check that the value is a digest, because it becomes part of a path."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256 in hexadecimal")
    return value


def _length(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value
