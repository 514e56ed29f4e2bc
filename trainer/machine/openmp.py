"""How the threads of OpenMP wait for each other."""

from __future__ import annotations

import os

__all__ = ["wait_passively"]


def wait_passively() -> None:
    """Make a thread that waits for others give its core away. Call this before torch is imported, which loads OpenMP.

    By default GNU's OpenMP spins for milliseconds at the end of each parallel part. Beside other programs, the thread that it waits
    for has no core meanwhile. Waiting changes no bit. A setting in the environment takes precedence.
    """
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
