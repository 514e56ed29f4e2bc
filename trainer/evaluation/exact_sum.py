"""Sums of fp32 numbers without rounding.

A fp32 number is an integer of 24 bits times a power of two (IEEE 754), so numbers of one exponent can be added as integers. The
sums are therefore the same in whatever order, and by whatever process, the numbers are added, and sums of parts make the sum of the
whole.

Shape suffixes: G groups, N numbers, E exponents.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUM_PARTS", "add_exactly", "exact_sum", "rounded_sum"]

NUM_PARTS = 257
"""Integers that hold a sum: one for each exponent of a finite number, one that counts infinities, one that counts NaNs."""

_INFINITE, _NAN = 255, 256
_SMALLEST = 149
"""The smallest fp32 number is 2^-149."""


def add_exactly(parts_GE: NDArray[np.int64], groups_N: NDArray[np.int64], values_N: NDArray[np.float32]) -> None:
    """Adds each value to the sum of its group, in place. A sum has room for 2^39 values.

    Args:
        parts_GE: the sums, `NUM_PARTS` integers each.
        groups_N: the row of each value's sum.
        values_N: fp32 numbers; both infinities count alike.
    """
    bits_N = values_N.view(np.uint32)
    exponents_N = ((bits_N >> 23) & 0xFF).astype(np.int64)
    mantissas_N = (bits_N & 0x7FFFFF).astype(np.int64)
    mantissas_N += (exponents_N > 0).astype(np.int64) << 23  # the leading one, which is not stored
    mantissas_N[np.signbit(values_N)] *= -1
    exponents_N[np.isnan(values_N)] = _NAN
    mantissas_N[exponents_N >= _INFINITE] = 1
    np.add.at(parts_GE.reshape(-1), groups_N * NUM_PARTS + exponents_N, mantissas_N)


def exact_sum(parts_E: NDArray[np.int64]) -> Fraction:
    """A sum as a fraction.

    Raises:
        ValueError: a value that was added is not finite.
    """
    if parts_E[_INFINITE] or parts_E[_NAN]:
        raise ValueError("numbers that are not finite have no exact sum")
    units = sum(int(parts_E[exponent]) << max(exponent - 1, 0) for exponent in np.flatnonzero(parts_E).tolist())
    return Fraction(units, 1 << _SMALLEST)


def rounded_sum(parts_E: NDArray[np.int64]) -> float:
    """A sum as the nearest fp64 number; NaN where one was added, else infinity where one was."""
    if parts_E[_NAN]:
        return math.nan
    return math.inf if parts_E[_INFINITE] else float(exact_sum(parts_E))
