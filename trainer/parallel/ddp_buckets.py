"""The exchange of DDP's gradient buckets. A rank without gradients can complete it."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with strings.

import inspect
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def wrapped_by_ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    # Buffers are equal on all ranks from the start, and are no state: see `trainer.extensions.hooks`.
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if has_new_name else "broadcast_buffers"  # its name before PyTorch 2.13
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **options | {name: False})


class BucketExchange:
    """A communication hook for DDP that adds each bucket over the ranks and counts the finished buckets of a backward pass. A rank
    whose backward pass failed sends zeros for the remaining buckets, which DDP exchanges in the same order on all ranks.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, torch.dtype, torch.device]] = []
        """Number of elements, type and device of each bucket in the last complete pass."""
        self._num_done = 0

    def begin(self) -> None:
        self._num_done = 0

    def exchange(
        self,
        _state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        gradients_P = bucket.buffer()
        self._num_done = bucket.index() + 1
        self._sizes[bucket.index() : None if bucket.is_last() else self._num_done] = [
            (gradients_P.numel(), gradients_P.dtype, gradients_P.device)
        ]
        work = dist.all_reduce(gradients_P, async_op=True)
        assert work is not None
        return cast("torch.futures.Future[Tensor]", work.get_future().then(lambda done: done.value()[0]))

    def complete(self) -> None:
        """Take part in the exchange of all buckets that this rank has not started. The last complete pass gives their sizes."""
        for num_elements, dtype, device in self._sizes[self._num_done :]:
            dist.all_reduce(torch.zeros(num_elements, dtype=dtype, device=device))
        self._num_done = len(self._sizes)

    def complete_first(self, module: DistributedDataParallel) -> None:
        """As `complete`, without an earlier pass: DDP makes the zeros, for all buckets at once."""
        for bucket in module.reducer._get_zeros_like_grad_buckets()[self._num_done :]:
            dist.all_reduce(bucket.buffer())
