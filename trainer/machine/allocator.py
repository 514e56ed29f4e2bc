"""Memory of a process that makes the same large tensors in every step.

By default glibc takes large blocks from the kernel and gives them back when a tensor dies. The kernel then clears the same
pages in every step, 4 KiB at a time, and processors look up their addresses anew.
"""

from __future__ import annotations

import ctypes
import os

__all__ = ["keep_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From malloc.h."""
_NEVER, _LARGEST = -1, 2**31 - 1


def keep_memory() -> None:
    """Lets this process keep the memory of freed tensors for those to come, and hold tensors of 2 MiB and more in huge pages.

    Call it before torch is imported, which reads the environment once. What the environment says already is left alone,
    as are C libraries other than glibc.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST)
