"""Marks of tests that run on each device. The same test then shows on a CPU that it is correct before a GPU runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])
on_each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise an error in this context if the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
