"""The exchange of DDP's buckets of gradients, which a rank can complete that has no gradients to give."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["BucketExchange"]


class BucketExchange:
    """A communication hook for DDP that adds up each bucket over the ranks, and knows which of a backward pass are done.

    DDP exchanges its buckets in one order on all ranks, each as soon as its gradients are there. A rank whose backward pass
    broke off gives zeros for the rest, so that the others do not wait for ever.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, torch.dtype, torch.device]] = []
        """Of all buckets, as the last complete pass had them."""
        self._num_done = 0

    def begin(self) -> None:
        """To be called before each step."""
        self._num_done = 0

    def exchange(
        self,
        _state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """The hook: the sum of a bucket, once it is there."""
        gradients_P = bucket.buffer()
        self._num_done = bucket.index() + 1
        self._sizes[bucket.index() : None if bucket.is_last() else self._num_done] = [
            (gradients_P.numel(), gradients_P.dtype, gradients_P.device)
        ]
        work = dist.all_reduce(gradients_P, async_op=True)
        assert work is not None
        return cast("torch.futures.Future[Tensor]", work.get_future().then(lambda done: done.value()[0]))

    def complete(self) -> None:
        """Takes part in the exchange of all buckets that this rank has not begun."""
        for num_elements, dtype, device in self._sizes[self._num_done :]:
            dist.all_reduce(torch.zeros(num_elements, dtype=dtype, device=device))
        self._num_done = len(self._sizes)
