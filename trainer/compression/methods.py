"""The methods of compression, and the weights that each of them changes. torchao quantises them, and chooses the scales."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from trainer.checkpoint.packed import pack_int4, pack_sparse
from trainer.compression import Method

_EMBEDDINGS = ("model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight")


@dataclass(frozen=True)
class Compression:
    method: Method
    group_size: int = 32  # columns of an int4 matrix that share a scale
    share: float = 0.5  # share of the weights that `prune` removes from each matrix

    def to_json(self) -> dict[str, Any]:
        used: dict[str, dict[str, Any]] = {"int4": {"group_size": self.group_size}, "prune": {"share": self.share}}
        return {"method": self.method} | used.get(self.method, {})

    def stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors to store for all weights of a decoder, by name.

        The matrices of the layers are compressed. Quantisation also compresses the embedding and the output projection, always to 8
        bits: with 4 bits they cost more loss than all layers together. Pruning leaves them as they are, because each row belongs to
        one token. Norms stay as they are.
        """
        stored: dict[str, Tensor] = {}
        for name, weight in weights.items():
            parts = self._parts(name, weight.float()) if weight.ndim == 2 else None
            if parts is None:
                stored[name] = weight
            else:
                stored |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        return stored

    def _parts(self, name: str, weight_NK: Tensor) -> dict[str, Tensor] | None:
        if name in _EMBEDDINGS:
            return quantised(weight_NK, bits=8) if self.method in ("int8", "int4") else None
        if self.method == "int8":
            return quantised(weight_NK, bits=8)
        if self.method == "int4":
            num_columns = weight_NK.shape[1]
            if num_columns % self.group_size or num_columns % 2:
                raise ConfigError(
                    f"{name} has {num_columns} columns, and --group_size {self.group_size} does not divide them; choose another"
                )
            return quantised(weight_NK, bits=4, group_size=self.group_size)
        pruned = magnitude_pruned(weight_NK, self.share) if self.method == "prune" else two_of_four(weight_NK)
        return pack_sparse(pruned)


def magnitude_pruned(weight_NK: Tensor, share: float) -> Tensor:
    """Return a matrix with the weights of the smallest magnitude set to zero (Han et al., 2015); of equal ones the earlier stay."""
    num_zeros = round(share * weight_NK.numel())
    order = weight_NK.abs().flatten().sort(descending=True, stable=True).indices
    pruned = weight_NK.clone()
    pruned.view(-1)[order[weight_NK.numel() - num_zeros :]] = 0
    return pruned


def two_of_four(weight_NK: Tensor) -> Tensor:
    """Return a matrix in which two of four neighbouring columns are zero in each row, those of the smaller magnitudes.

    This is the pattern that the sparse tensor cores of GPUs multiply (Mishra et al., 2021). Columns beyond a multiple of four stay.
    """
    num_rows, num_columns = weight_NK.shape
    whole = num_columns // 4 * 4
    groups = weight_NK[:, :whole].reshape(num_rows, -1, 4)
    smaller = groups.abs().sort(dim=-1, descending=True, stable=True).indices[..., 2:]
    pruned = groups.scatter(-1, smaller, 0.0).reshape(num_rows, whole)
    return torch.cat((pruned, weight_NK[:, whole:]), dim=1)


def quantised(weight_NK: Tensor, *, bits: int, group_size: int | None = None) -> dict[str, Tensor]:
    """Return the tensors of a quantised matrix by the last part of their names. `group_size`: columns of a scale; None: a row.

    Scales are symmetric: a scale is the largest magnitude of its weights over 127.5 or 7.5, half of the range of the integers. So
    the largest positive weight of a scale is rounded to 127 or 7 steps, half a step less than its value.
    """
    torchao = _torchao()
    layer = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False)
    layer.weight = nn.Parameter(weight_NK, requires_grad=False)
    four_bits: Any = vars(torch)["int4"]  # the stubs of torch do not name it
    if bits == 8:
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    else:
        granularity = torchao.granularity.PerGroup(group_size or weight_NK.shape[1])
        torchao.quantize_(layer, torchao.IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=granularity))
    stored: Any = layer.weight
    integers_NK, scale_NS = stored.qdata.clone(), stored.scale.float().clone()
    return {"qdata": integers_NK if bits == 8 else pack_int4(integers_NK), "scale": scale_NS}


def _torchao() -> Any:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # about kernels for other machines
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchao.quantization.granularity")
            return importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ConfigError(
            f"quantisation needs torchao, which cannot be loaded ({error}); install it with "
            "`pip install --no-deps --require-hashes -r env/requirements-models.lock`"
        ) from None
    finally:
        logging.disable(level)
