"""Sums of fp32 numbers without rounding.

A fp32 number is an integer of 24 bits times a power of two (IEEE 754), so numbers with the same exponent can be added as integers.
The sums therefore depend neither on the order nor on the process, and the sums of parts add up to the sum of the whole.

Shape suffixes: G groups, N numbers, E exponents.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

NUM_PARTS = 257  # integers of a sum: one for each exponent of a finite number, the number of infinities, the number of NaNs

_INFINITE, _NAN = 255, 256
_SMALLEST = 149


def add_exactly(parts_GE: NDArray[np.int64], groups_N: NDArray[np.int64], values_N: NDArray[np.float32]) -> None:
    """Add each value to the sum of its group, in place. A sum can hold 2^39 values. Both infinities count as the same."""
    bits_N = values_N.view(np.uint32)
    exponents_N = ((bits_N >> 23) & 0xFF).astype(np.int64)
    mantissas_N = (bits_N & 0x7FFFFF).astype(np.int64)
    mantissas_N += (exponents_N > 0).astype(np.int64) << 23  # the leading bit, which is not stored
    mantissas_N[np.signbit(values_N)] *= -1
    exponents_N[np.isnan(values_N)] = _NAN
    mantissas_N[exponents_N >= _INFINITE] = 1
    np.add.at(parts_GE.reshape(-1), groups_N * NUM_PARTS + exponents_N, mantissas_N)


def exact_sum(parts_E: NDArray[np.int64]) -> Fraction:
    """Return a sum as a fraction. Raises ValueError if a value of it is not finite."""
    if parts_E[_INFINITE] or parts_E[_NAN]:
        raise ValueError("values that are not finite have no exact sum")
    units = sum(int(parts_E[exponent]) << max(exponent - 1, 0) for exponent in np.flatnonzero(parts_E).tolist())
    return Fraction(units, 1 << _SMALLEST)


def rounded_sum(parts_E: NDArray[np.int64]) -> float:
    """Return a sum as the nearest fp64 number: NaN if it has a NaN, else infinity if it has an infinity."""
    if parts_E[_NAN]:
        return math.nan
    return math.inf if parts_E[_INFINITE] else float(exact_sum(parts_E))
