"""Decides on which side of training and validation a document falls: by its content, or by its place in the file."""

from __future__ import annotations

import hashlib
from typing import Literal

from data_pipeline.config import SplitSettings

__all__ = ["SPLITS", "Split", "choose_split", "content_fraction", "tail_offset"]

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")


def content_fraction(text: bytes, seed: int) -> float:
    """A number in [0, 1) that depends on the text and the seed alone: the first 53 bits of sha256(seed, text)."""
    digest = hashlib.sha256(seed.to_bytes(8, "big") + text).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def choose_split(text: bytes, offset: int, file_bytes: int, settings: SplitSettings) -> Split:
    """The side of a cleaned document that began at `offset` of its file. By content, equal texts always fall on the same side."""
    if settings.by == "tail":
        return "val" if offset >= tail_offset(file_bytes, settings.val_fraction) else "train"
    return "val" if content_fraction(text, settings.seed) < settings.val_fraction else "train"


def tail_offset(file_bytes: int, fraction: float) -> int:
    """Where the last `fraction` of a file begins, in bytes."""
    return file_bytes - round(file_bytes * fraction)
