"""Quantisation of weights to 8 or 4 bits by torchao, which chooses the scales."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from trainer.checkpoint.packed import pack_int4


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
