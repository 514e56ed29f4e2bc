"""The formats of `export`: a module each, with its parts as `FORMAT`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.interop import Dtype
from trainer.model.saved_decoder import SavedDecoder

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shards = Mapping[str, Mapping[str, Tensor]]  # tensors by the name of their file and their own name, in fp32


@dataclass(frozen=True)
class ExportFormat:
    """What an export writes besides `export.json`. ConfigError of a part: the format cannot express the checkpoint."""

    described: Callable[[SavedDecoder, Dtype, bool], dict[str, bytes]]
    """Returns the files that describe model and tokenizer, by name; the third argument: refuse a tokenizer that would give other
    ids for some texts. They depend on the checkpoint and the settings of its run, so `verify` makes them again."""
    tensors: Callable[[SavedDecoder, Dtype], Shards] = lambda _source, _dtype: {}
    card: Callable[[SavedDecoder, Dtype], bytes] | None = None  # content of `README.md`, which changes when the run continues
    write_graphs: Callable[[SavedDecoder, Path], None] | None = None  # writes further files into the folder
    check: Callable[[SavedDecoder, Dtype], None] = lambda _source, _dtype: None
    holds_all_weights: bool = True  # whether the tensors of all files together are the weights of the model
