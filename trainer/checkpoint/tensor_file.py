"""Tensor files in the safetensors format: written without a copy, read from bytes whose digest has been verified.

The safetensors library is not used. It maps the file that it reads, so the file may change after the check, and a truncated file
kills the process. To write, it copies the tensors while it holds the GIL, which training needs.
A file contains the length of the header (8 bytes, little-endian), the header in JSON (`dtype`, `shape` and `data_offsets` for
each name), and the tensors, little-endian and without gaps. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from common.files import parse_json
from trainer.runs.manifest import TensorSpec

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 64 << 20
_ALIGNMENT = 8


def spec_of(tensor: Tensor) -> TensorSpec:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{tensor.dtype} cannot be saved; known are {', '.join(map(str, _NAMES))}")
    return TensorSpec(_NAMES[tensor.dtype], tuple(tensor.shape))


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a CPU tensor in order, as bytes. A view if the tensor is contiguous, else a copy."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[str]]:
    """Return the file's beginning and the order of the tensors: wide types first, which aligns them."""
    order = sorted(specs, key=lambda name: (-specs[name].item_bytes, name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        begin, end = end, end + specs[name].num_bytes
        header[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def write_tensor_file(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new file, durably. One tensor at a time is converted to `dtype`, so no copy of the model is in memory."""
    specs = {name: spec_of(torch.empty_like(tensor, dtype=dtype, device="meta")) for name, tensor in tensors.items()}
    header, order = encode_header(specs, metadata)
    with path.open("xb") as file:
        file.write(header)
        for name in order:
            file.write(raw_bytes(tensors[name].to(dtype or tensors[name].dtype)))
        file.flush()
        os.fsync(file.fileno())


def decode_tensors(content: bytearray) -> dict[str, Tensor]:
    """They share the memory of `content`. ValueError: it is not a tensor file, or its header does not fit the bytes that follow."""
    begin = 8 + _header_bytes(content[:8], len(content))
    tensors, offset = {}, begin
    for name, spec in _in_order(content[8:begin], len(content)).items():
        if offset % spec.item_bytes:
            raise ValueError(
                f"tensor {name!r} begins at byte {offset}, which is not a multiple of its element size {spec.item_bytes}"
            )
        tensors[name] = _view(content, spec, offset)
        offset += spec.num_bytes
    return tensors


def read_specs(file: BinaryIO, num_bytes: int) -> dict[str, TensorSpec]:
    """Read the header of a tensor file of this size. Return the tensors in their order in the file, for `read_tensor`."""
    size = _header_bytes(file.read(8), num_bytes)
    return _in_order(file.read(size), num_bytes)


def read_tensor(file: BinaryIO, spec: TensorSpec) -> Tensor:
    content = bytearray(file.read(spec.num_bytes))
    if len(content) != spec.num_bytes:
        raise ValueError(f"it ends within a tensor: {len(content)} of {spec.num_bytes} bytes are there")
    return _view(content, spec, 0)


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(raw_bytes(tensor)).hexdigest()


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same type, shape and bits. A NaN equals a NaN with the same bits."""
    if spec_of(first) != spec_of(second):
        return False
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def _header_bytes(first: bytes | bytearray, num_bytes: int) -> int:
    size = int.from_bytes(first, "little")
    if len(first) < 8 or size > min(num_bytes - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"its header claims {size} bytes in a file of {num_bytes}")
    return size


def _in_order(header: bytes | bytearray, num_bytes: int) -> dict[str, TensorSpec]:
    """Return the tensors of a header in their order. They must fill a file of `num_bytes` without gaps."""
    placed = []
    try:
        for name, entry in parse_json(bytes(header), unique=True).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                if type(first) is not int or type(last) is not int:
                    raise ValueError(f"offsets {first!r} and {last!r}")
                placed.append((name, TensorSpec(entry["dtype"], tuple(entry["shape"])), first, last))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not the header of a tensor file: {error}") from None
    begin, end = 8 + len(header), 0
    placed.sort(key=lambda entry: entry[2:])
    for name, spec, first, last in placed:
        if first != end or last - first != spec.num_bytes:
            raise ValueError(
                f"tensor {name!r} of {spec.num_bytes} bytes claims bytes {first} to {last}, and must begin at byte {end}"
            )
        end = last
    if begin + end != num_bytes:
        raise ValueError(f"its tensors end at byte {begin + end}, and the file at byte {num_bytes}")
    return {name: spec for name, spec, _, _ in placed}


def _view(content: bytearray, spec: TensorSpec, offset: int) -> Tensor:
    dtype = _DTYPES[spec.dtype]
    if spec.num_bytes == 0:
        return torch.empty(spec.shape, dtype=dtype)
    if dtype is torch.bool and max(content[offset : offset + spec.num_bytes]) > 1:
        raise ValueError("a truth value is neither 0 nor 1")
    return torch.frombuffer(content, dtype=dtype, count=math.prod(spec.shape), offset=offset).reshape(spec.shape)
