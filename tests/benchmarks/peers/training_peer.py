"""What the peers of `tests/benchmarks/training.py` share: the settings, the stream of tokens and random crops of it.

A peer is called as `python PEER.py SETTINGS.json` and prints the seconds of each step as a JSON list. It must run without
this project's packages.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Settings:
    """The same for all contestants."""

    tokens: str
    """A file of uint16 ids, one document after the other."""
    layers: int
    width: int
    heads: int
    mlp_width: int
    vocab: int
    length: int
    """Positions of a row; one more token is read for the last target."""
    micro: int
    micro_batches: int
    steps: int
    threads: int
    bf16: bool
    """Whether matrix products are in bf16, by autocast; else all is in fp32."""
    device: str = "cpu"
    compiled: bool = False
    """Whether the model goes through torch.compile."""


def read_settings() -> Settings:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(1337)
    return settings


def crop(tokens: np.ndarray, length: int) -> np.ndarray:
    """`length` tokens from anywhere in the stream, int64."""
    start = int(torch.randint(len(tokens) - length, ()))
    return tokens[start : start + length].astype(np.int64)


def stream(settings: Settings) -> np.ndarray:
    return np.memmap(settings.tokens, dtype=np.uint16, mode="r")
