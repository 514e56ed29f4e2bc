"""Memory allocation of a process that creates the same large tensors in every step.

By default glibc takes large blocks from the kernel and returns them when a tensor is freed. The kernel then clears the same
pages in every step, 4 KiB at a time, and their addresses must be translated again.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from malloc.h."""
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_memory() -> None:
    """Make this process reuse the memory of freed tensors, and place tensors of 2 MiB and more in huge pages.

    Call this before torch is imported, because torch reads the environment once. Settings in the environment take precedence. C
    libraries other than glibc are left unchanged.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
