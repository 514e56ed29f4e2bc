"""The parts of a format of `export`, and what formats share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.checkpoint.tensor_file import encode_header, raw_bytes, spec_of
from trainer.interop.formats import Dtype
from trainer.interop.source import ExportSource

DTYPES: Mapping[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shards = Mapping[str, Mapping[str, Tensor]]  # tensors by the name of their file and their own name, in fp32


@dataclass(frozen=True)
class ExportFormat:
    """What an export writes besides `export.json`. ConfigError of a part: the format cannot express the checkpoint."""

    described: Callable[[ExportSource, Dtype, bool], dict[str, bytes]]
    """Returns the files that describe model and tokenizer, by name; the third argument: refuse a tokenizer that would give other
    ids for some texts. They depend on the checkpoint and the settings of its run, so `verify` makes them again."""
    tensors: Callable[[ExportSource, Dtype], Shards] = lambda _source, _dtype: {}
    card: Callable[[ExportSource, Dtype], bytes] | None = None  # content of `README.md`, which changes when the run continues
    write_graphs: Callable[[ExportSource, Path], None] | None = None  # writes further files into the folder
    check: Callable[[ExportSource, Dtype], None] = lambda _source, _dtype: None
    holds_all_weights: bool = True  # whether the tensors of all files together are the weights of the model


def write_tensors(shards: Shards, dtype: Dtype, folder: Path) -> None:
    """Write tensor files, durably. One tensor at a time is converted, so no copy of the model is in memory."""
    for file_name, shard in shards.items():
        specs = {name: spec_of(torch.empty_like(weight, dtype=DTYPES[dtype], device="meta")) for name, weight in shard.items()}
        header, order = encode_header(specs, {"format": "pt"})
        with (folder / file_name).open("xb") as file:
            file.write(header)
            for name in order:
                file.write(raw_bytes(shard[name].to(DTYPES[dtype])))
            file.flush()
            os.fsync(file.fileno())
