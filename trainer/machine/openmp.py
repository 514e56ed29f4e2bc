"""How the threads of OpenMP wait for each other."""

from __future__ import annotations

import os

__all__ = ["spin_briefly"]

_SPINS = 3000
"""About 10 µs. Two threads, 0.80M weights, two cores: steps of 30 ms as with the default of 300,000 and 80 ms beside two busy
programs, where the default needs 83 ms to minutes. Passive waiting needs 40 ms and 54 to 108 ms."""


def spin_briefly() -> None:
    """Make a thread that waits for others give its core away soon. Call this before torch is imported, which loads OpenMP.

    By default GNU's OpenMP spins for milliseconds at the end of each parallel part. Beside other programs, the thread that it waits
    for has no core meanwhile. Waiting changes no bit. A setting in the environment takes precedence.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
