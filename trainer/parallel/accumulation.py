"""How gradients of micro-batches become those of the global batch: on one rank, under DDP or FSDP, or in the order of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.parallel.ddp_buckets import BucketExchange
from trainer.parallel.fsdp import ShardedModule
from trainer.parallel.gradient_tree import GradientTree

__all__ = ["Accumulation", "DdpAccumulation", "FsdpAccumulation", "TreeAccumulation"]


class Accumulation:
    """Sums gradients over micro-batches and ranks; after `finish` every rank has what belongs to the whole global batch.

    This class is that of one rank: `backward` adds to what is there.
    """

    averages = False
    """True where the sum over ranks is divided by their number, as FSDP does."""
    can_join = True
    """Whether a rank whose passes broke off can still do its part of the exchanges, so that the others do not wait for ever."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward pass; `last` is that of the rank's last one."""
        del last
        return nullcontext()

    def finish(self) -> None:
        """Completes the sum."""

    def join(self, num_passes: int) -> None:
        """Does this rank's part of the exchanges of a step that broke off; the sum is worthless then, on all ranks.

        Args:
            num_passes: this rank's passes in a step.
        """
        del num_passes
        self.begin()


class DdpAccumulation(Accumulation):
    """DDP exchanges gradients during the last backward pass, bucket by bucket, while the others are still computed.

    They are added and not averaged, which spares the division, and has the same bits for a power of two of ranks. A module whose
    pass broke off cannot be used again.
    """

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module
        self._exchange = BucketExchange()
        module.register_comm_hook(None, self._exchange.exchange)

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        super().begin()
        self._exchange.begin()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Without an exchange in all passes but the last."""
        return nullcontext() if last else cast("AbstractContextManager[None]", self._module.no_sync())

    def join(self, num_passes: int) -> None:
        """Gives zeros for the buckets that are left."""
        del num_passes
        super().begin()
        self._exchange.complete()


class FsdpAccumulation(Accumulation):
    """FSDP scatters the sum of gradients during the last backward pass, so that each rank has those of its part of the weights."""

    averages = True
    can_join = False
    """Weights are gathered in the middle of every pass; a rank that dropped out of one does not know what the others wait for."""

    def __init__(self, module: ShardedModule, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Without an exchange in all passes but the last."""
        self._module.set_requires_gradient_sync(last)
        return nullcontext()


class TreeAccumulation(Accumulation):
    """Every sum in the order of a binary tree over the micro-batches: see `reduction`."""

    def __init__(self, tree: GradientTree) -> None:
        self._tree = tree
        self._num_leaves = 0
        self._finished = False

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        self._tree.begin()
        self._num_leaves, self._finished = 0, False

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Takes the gradients of the pass as the next leaf."""
        del last
        yield
        self._tree.add()
        self._num_leaves += 1

    def finish(self) -> None:
        """Adds the sums of all ranks."""
        self._tree.finish()
        self._finished = True

    def join(self, num_passes: int) -> None:
        """Adds a tree with empty leaves in place of the passes that are left."""
        for _ in range(num_passes - self._num_leaves):
            self._tree.add()
        self._num_leaves = num_passes
        if not self._finished:
            self.finish()
