from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text import mix_hashes

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")


def fractions_of_keys(keys_D: NDArray[np.uint64], seed: int) -> NDArray[np.float64]:
    """Return for each key, a part of a digest, a number in [0, 1) that depends only on the key and the seed."""
    return (mix_hashes(mix_hashes(keys_D) + np.uint64(seed)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def is_held_out(keys_D: NDArray[np.uint64], val_fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return which documents are for validation. Documents of one cluster share a key, so they are in the same split."""
    return fractions_of_keys(keys_D, seed) < val_fraction


def fewest_held_out(min_val_documents: int, num_documents: int) -> int:
    """Return the minimum number of validation documents: a tenth of a small data set, but at least one."""
    return min(min_val_documents, max(1, num_documents // 10))


def tail_offset(file_bytes: int, fraction: float) -> int:
    return file_bytes - round(file_bytes * fraction)
