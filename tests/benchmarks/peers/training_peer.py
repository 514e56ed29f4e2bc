"""Code that the peers of `tests/benchmarks/steps.py` share: the settings, the stream of tokens, and random crops from it.

A peer is called as `python PEER.py SETTINGS.json` and prints the seconds of each step as a JSON list. It must run without the
packages of this project.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Settings:
    """Settings that are the same for all contestants."""

    tokens: str
    """Path of a file of uint16 ids, one document after the other."""
    layers: int
    width: int
    heads: int
    mlp_width: int
    vocab: int
    length: int
    """Positions of a row. One more token is read for the last target."""
    micro: int
    micro_batches: int
    steps: int
    threads: int
    bf16: bool
    """Whether matrix products run in bf16, by autocast. Otherwise everything runs in fp32."""
    device: str = "cpu"
    compiled: bool = False
    """Whether the model is compiled with torch.compile."""


def read_settings() -> Settings:
    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(settings.threads)
    torch.manual_seed(1337)
    return settings


def crop(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return `length` consecutive tokens from a random position of the stream, int64."""
    start = int(torch.randint(len(tokens) - length, ()))
    return tokens[start : start + length].astype(np.int64)


def stream(settings: Settings) -> np.ndarray:
    return np.memmap(settings.tokens, dtype=np.uint16, mode="r")
