"""Weights of a compressed model as they are stored, and back to ordinary tensors.

A matrix of N rows and K columns, `NAME`, is stored as several tensors:

    int8    NAME.qdata    int8 (N, K)             NAME.scale   fp32 (N, 1)
    int4    NAME.qdata    uint8 (N, K / 2)        NAME.scale   fp32 (N, K / G)   G columns share a scale
    pruned  NAME.values   fp32, those not zero    NAME.mask    uint8 (N, K / 8 rounded up)    NAME.columns  int64, K

A quantised weight is the product of the stored integer and its scale. A byte of int4 has the integer of an even column in its lower
half and that of the next column in its upper half, each plus 8. A byte of a mask has the bit of its first column on the right, and
the values follow row by row. All other weights are stored as they are.

Only the files are smaller. In memory the weights are fp32: see "Compression" in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_QUANTISED = ("qdata", "scale")
_PRUNED = ("values", "mask", "columns")
_INT4_OFFSET = 8
_BITS = 8  # columns of a byte of a mask
_MOST_COLUMNS = 1 << 32


def pack_int4(integers_NK: Tensor) -> Tensor:
    """Return uint8 (N, K / 2) of integers from -8 to 7. K must be even."""
    shifted_NK = (integers_NK + _INT4_OFFSET).to(torch.uint8)
    return shifted_NK[:, ::2] | (shifted_NK[:, 1::2] << 4)


def pack_sparse(weight_NK: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a matrix with many zeros, by the last part of their names. Only its other weights take space."""
    kept_NK = weight_NK != 0
    bits = np.packbits(kept_NK.numpy(), axis=1, bitorder="little")
    return {"values": weight_NK[kept_NK], "mask": torch.from_numpy(bits), "columns": torch.tensor(weight_NK.shape[1])}


def is_packed(names: Mapping[str, Tensor]) -> bool:
    return any(name.endswith((".qdata", ".mask")) for name in names)


def num_unpacked(stored: Mapping[str, Tensor]) -> int:
    """Return how many numbers the ordinary tensors have, or a little more: a row of a mask counts as whole bytes."""
    per_number = {"qdata": 1, "mask": _BITS, "scale": 0, "values": 0, "columns": 0}
    total = 0
    for name, tensor in stored.items():
        part = name.rpartition(".")[2]
        halves = 2 if part == "qdata" and tensor.dtype == torch.uint8 else 1
        total += tensor.numel() * per_number.get(part, 1) * halves
    return total


def unpack(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ordinary tensors by name. ValueError names a weight whose parts do not belong together."""
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        weight, _, part = name.rpartition(".")
        if part not in (*_QUANTISED, *_PRUNED):
            weights[name] = tensor
        elif part in ("qdata", "values"):
            wanted = _QUANTISED if part == "qdata" else _PRUNED
            if any(f"{weight}.{one}" not in stored for one in wanted):
                raise ValueError(f"{weight}: of {', '.join(wanted)}, some are missing")
            if weight in stored or weight in weights:
                raise ValueError(f"{weight}: it is there in two forms")
            parts = [stored[f"{weight}.{one}"] for one in wanted]
            try:
                weights[weight] = _dequantised(*parts) if part == "qdata" else _dense(*parts)
            except ValueError as error:
                raise ValueError(f"{weight}: {error}") from None
    return weights


def _dequantised(qdata: Tensor, scale_NS: Tensor) -> Tensor:
    if scale_NS.dtype != torch.float32:
        raise ValueError(f"scales of type {scale_NS.dtype}; float32 is expected")
    if qdata.ndim != 2 or scale_NS.ndim != 2 or len(qdata) != len(scale_NS) or not qdata.numel():
        raise ValueError(f"integers of shape {tuple(qdata.shape)} and scales of shape {tuple(scale_NS.shape)} do not fit")
    if qdata.dtype == torch.uint8:
        halves = torch.stack((qdata & 15, qdata >> 4), dim=-1).flatten(1)
        integers_NK = halves.to(torch.int8) - _INT4_OFFSET
    elif qdata.dtype == torch.int8:
        integers_NK = qdata
    else:
        raise ValueError(f"integers of type {qdata.dtype}; int8 or uint8 is expected")
    num_rows, num_columns = integers_NK.shape
    groups = scale_NS.shape[1]
    if not groups or num_columns % groups or not bool(scale_NS.isfinite().all()):
        raise ValueError(f"{num_columns} columns cannot have {groups} scales each, or a scale is not finite")
    grouped = integers_NK.view(num_rows, groups, -1).float() * scale_NS[..., None]
    return grouped.view(num_rows, num_columns)


def _dense(values: Tensor, mask: Tensor, columns: Tensor) -> Tensor:
    types = (values.dtype, mask.dtype, columns.dtype)
    if types != (torch.float32, torch.uint8, torch.int64) or (values.ndim, mask.ndim, columns.ndim) != (1, 2, 0):
        raise ValueError("the mask, the values or the number of columns has another type or shape")
    num_columns = int(columns)
    if not 0 < num_columns <= _MOST_COLUMNS or mask.shape[1] != -(-num_columns // 8):
        raise ValueError(f"a mask of {mask.shape[1]} bytes a row cannot have {num_columns} columns")
    kept_NK = torch.from_numpy(np.unpackbits(mask.numpy(), axis=1, count=num_columns, bitorder="little")).bool()
    if int(kept_NK.sum()) != len(values):
        raise ValueError(f"the mask has {int(kept_NK.sum())} weights, and there are {len(values)} values")
    weight_NK = torch.zeros(kept_NK.shape, dtype=values.dtype)
    weight_NK[kept_NK] = values
    return weight_NK
