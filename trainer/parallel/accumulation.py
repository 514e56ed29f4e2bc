"""Sums gradients of micro-batches to the gradient of the global batch: on one rank, with DDP or FSDP, or in the order of a tree."""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types, not with strings.

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.distributed.group import Group
from trainer.machine.memory import fits_in_memory, release_memory

if TYPE_CHECKING:
    from trainer.parallel.fsdp import ShardedModule

_LATE_NUMBERS = 8 << 20  # numbers that `LateAccumulation` adds in one exchange: 32 MiB, which is enough to use a network fully


class Accumulation:
    """Sums gradients over micro-batches and ranks. After `finish` every rank has the gradient of the global batch.

    This class serves a single rank, where `backward` adds to the existing gradients. Subclasses serve several ranks.
    """

    averages = False  # True if the sum over ranks is divided by their number, as in FSDP
    can_join = True
    """Whether a rank whose pass failed can still take part in the exchanges, so that the others do not wait for ever."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def begin(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context of one forward and backward pass. `last` marks the last pass of this rank."""
        del last
        return nullcontext()

    def finish(self) -> None: ...

    def join(self, num_passes: int) -> None:
        """Take part in the exchanges of a step whose pass failed on this rank. The sum is then invalid on all ranks."""
        del num_passes
        self.begin()


def wrapped_by_ddp(module: nn.Module, **options: Any) -> DistributedDataParallel:
    # Buffers are equal on all ranks from the start, and are no state: see `trainer.extensions.hooks`.
    has_new_name = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if has_new_name else "broadcast_buffers"  # its name before PyTorch 2.13
    return DistributedDataParallel(module, gradient_as_bucket_view=True, **options | {name: False})


class BucketExchange:
    """A communication hook for DDP that adds each bucket over the ranks and counts the finished buckets of a backward pass. A rank
    whose backward pass failed sends zeros for the remaining buckets, which DDP exchanges in the same order on all ranks.

    It knows no module: DDP holds its hook where the garbage collector does not see it, so a cycle would keep the module for ever.
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
        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(lambda done: done.value()[0]))

    def complete(self) -> None:
        """Take part in the exchange of all buckets that this rank has not started. The last complete pass gives their sizes."""
        for num_elements, dtype, device in self._sizes[self._num_done :]:
            dist.all_reduce(torch.zeros(num_elements, dtype=dtype, device=device))
        self._num_done = len(self._sizes)

    def complete_first(self, module: DistributedDataParallel) -> None:
        """As `complete`, without an earlier pass: DDP makes the zeros, for all buckets at once."""
        for bucket in module.reducer._get_zeros_like_grad_buckets()[self._num_done :]:
            dist.all_reduce(bucket.buffer())


class DdpAccumulation(Accumulation):
    """DDP exchanges gradients during the last backward pass, bucket by bucket, while later ones are still computed.

    Gradients are added and not averaged. This saves the division, and has the same bits if the number of ranks is a power of two.
    A module cannot be used again after a failed pass.
    """

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module
        self._exchange = BucketExchange()
        module.register_comm_hook(None, self._exchange.exchange)

    def begin(self) -> None:
        super().begin()
        self._exchange.begin()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else cast("AbstractContextManager[None]", self._module.no_sync())

    def join(self, num_passes: int) -> None:
        del num_passes
        super().begin()
        self._exchange.complete()

    def settle(self, backward: Callable[[], None]) -> Iterator[bool]:
        """Run passes that make DDP choose its final buckets. Yield after each part whether memory sufficed on this rank.

        DDP regroups its gradient buckets after the first backward pass. The second pass shows the new buckets. No rank may continue
        with the next part until all ranks have completed this one.
        """
        for _ in range(2):
            self._exchange.begin()
            if not (fits := fits_in_memory(backward)):
                release_memory()
                self._exchange.complete_first(self._module)
            yield fits
            yield fits_in_memory(self._module.reducer._rebuild_buckets)  # otherwise the next forward pass does it


class LateAccumulation(Accumulation):
    """Adds gradients over the ranks after the last backward pass.

    An extension's training step makes any number of passes over a micro-batch, and a weight may have no gradient in some of them.
    DDP can do neither. The exchange does not overlap with the backward pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group, most: int = _LATE_NUMBERS) -> None:
        """Each exchange adds at most `most` numbers, or one weight."""
        super().__init__(parameters)
        self._group = group
        self._parts: list[list[nn.Parameter]] = []
        self._num_done = 0
        size = most
        for parameter in self._parameters:
            if size + parameter.numel() > most:
                self._parts.append([])
                size = 0
            self._parts[-1].append(parameter)
            size += parameter.numel()

    def begin(self) -> None:
        super().begin()
        self._num_done = 0

    def finish(self) -> None:
        """Add the gradients of all ranks. A missing gradient counts as zero."""
        for part in self._parts[self._num_done :]:
            gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in part]
            sum_P = torch.cat([gradient.flatten() for gradient in gradients])
            self._group.sum(sum_P)
            self._num_done += 1
            for weight, gradient in zip(part, torch.split(sum_P, [weight.numel() for weight in part]), strict=True):
                weight.grad = gradient.view_as(weight)

    def join(self, num_passes: int) -> None:
        del num_passes
        super().begin()
        self.finish()


class FsdpAccumulation(Accumulation):
    """FSDP reduces and scatters gradients during the last backward pass. Each rank keeps those of its part of the weights."""

    averages = True
    can_join = False
    """Weights are gathered within every pass. A rank whose pass failed does not know which exchange the others wait for."""

    def __init__(self, module: "ShardedModule", parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        self._module.set_requires_gradient_sync(last)
        return nullcontext()
