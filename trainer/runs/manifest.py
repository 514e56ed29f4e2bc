"""The manifest of a checkpoint: sealed canonical JSON with all tensors and their files. Each value of a file is checked.

format   3
step     the step of the saved state
objects  name of an object file (the sha256 of its bytes) -> its size in bytes
tensors  "model/<weight>", "optimizer/<weight>/<kind>", "average/<weight>" -> object, sha256 of the numbers, dtype, shape, bytes
state    counters and other plain data: see `trainer.runs.state`
seal     sha256 over all fields above
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from common.files import unsealed
from common.untrusted import Schema, parsed

FORMAT = 3  # increases whenever the layout of the manifest, or of the state in it, changes
MAX_MANIFEST_BYTES = 64 << 20
ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1},
}
"""The size of a number by the name of its type in the safetensors format."""
_MAX_AXES = 16
_MAX_ELEMENTS = 1 << 58  # the size in bytes of that many elements of the widest type still fits 63 bits
_SHOWN_CHARS = 80
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # a sha256 in hexadecimal, which may become part of a path
_Size = Annotated[int, Field(ge=0)]


class OtherFormatError(ValueError):
    """Another version of this program wrote the manifest. This is not damage."""


@dataclass(frozen=True)
class TensorSpec:
    dtype: str  # name of the type in the safetensors format
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype {self.dtype!r}; known are {', '.join(ITEM_BYTES)}")
        if len(self.shape) > _MAX_AXES or not all(type(length) is int and length >= 0 for length in self.shape):
            raise ValueError(f"shape {str(self.shape)[:_SHOWN_CHARS]} is not a list of at most {_MAX_AXES} lengths")
        # Axes of length 0 are ignored here, because the strides of the other axes must fit 63 bits too.
        if math.prod(length for length in self.shape if length) > _MAX_ELEMENTS:
            raise ValueError(f"shape {self.shape} is larger than any tensor can be")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


class StoredTensor(Schema):
    object: Digest  # Name of the object file. The tensor has the same name there as in the manifest.
    sha256: Digest  # digest of the raw values of the tensor
    dtype: str
    shape: list[int]
    bytes: _Size

    @classmethod
    def of(cls, object_name: str, digest: str, spec: TensorSpec) -> StoredTensor:
        return cls(object=object_name, sha256=digest, dtype=spec.dtype, shape=list(spec.shape), bytes=spec.num_bytes)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.dtype, tuple(self.shape))

    @model_validator(mode="after")
    def _check_bytes(self) -> Self:
        if self.bytes != self.spec.num_bytes:
            raise ValueError(f"a tensor of {self.dtype} {self.shape} claims {self.bytes} bytes")
        return self


class CheckpointManifest(Schema, extra="forbid"):
    format: Literal[3] = 3
    step: _Size
    objects: dict[Digest, _Size]
    tensors: dict[str, StoredTensor]
    state: dict[str, Any]

    @classmethod
    def from_file(cls, data: bytes) -> CheckpointManifest:
        """Raises OtherFormatError for an undamaged manifest of another format, and ValueError for one that was changed."""
        try:
            content = unsealed(data)
            found = content.get("format")
            if type(found) is int and found != FORMAT:
                raise OtherFormatError(
                    f"it has format {found} of checkpoints, and this program reads {FORMAT}; use the version that wrote it"
                )
            return parsed(cls, content)
        except OtherFormatError:
            raise
        except ValueError as error:
            raise ValueError(f"the manifest is damaged or was changed ({error})") from None

    @property
    def num_weights(self) -> int:
        return sum(math.prod(stored.shape) for name, stored in self.tensors.items() if name.startswith("model/"))

    @model_validator(mode="after")
    def _check_objects(self) -> Self:
        if self.objects.keys() != {stored.object for stored in self.tensors.values()}:
            raise ValueError("its objects differ from those that its tensors name")
        return self
