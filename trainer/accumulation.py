"""How gradients of micro-batches become those of the global batch: on one rank, under DDP or FSDP, or in the order of the tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.parallel import ShardedModule
from trainer.reduction import GradientTree

__all__ = ["Accumulation", "DdpAccumulation", "FsdpAccumulation", "PlainAccumulation", "TreeAccumulation"]


class Accumulation(Protocol):
    """Sums gradients over micro-batches and ranks; after `finish` every rank has what belongs to the whole global batch."""

    averages: bool
    """True where the sum over ranks is divided by their number, as DDP and FSDP do."""

    def begin(self) -> None:
        """Forgets the gradients of the step before."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """The context of one forward and backward pass; `last` is that of the rank's last one."""

    def finish(self) -> None:
        """Completes the sum."""


class PlainAccumulation:
    """One rank: `backward` adds to what is there."""

    averages = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = tuple(parameters)

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        for parameter in self._parameters:
            parameter.grad = None

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Nothing around a pass."""
        del last
        return nullcontext()

    def finish(self) -> None:
        """Nothing is left to do."""


class DdpAccumulation(PlainAccumulation):
    """DDP exchanges gradients during the last backward pass, bucket by bucket, while the others are still computed."""

    averages = True

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Without an exchange in all passes but the last."""
        return nullcontext() if last else cast("AbstractContextManager[None]", self._module.no_sync())


class FsdpAccumulation(PlainAccumulation):
    """FSDP scatters the sum of gradients during the last backward pass, so that each rank has those of its part of the weights."""

    averages = True

    def __init__(self, module: ShardedModule, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._module = module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Without an exchange in all passes but the last."""
        self._module.set_requires_gradient_sync(last)
        return nullcontext()


class TreeAccumulation:
    """Every sum in the order of a binary tree over the micro-batches: see `reduction`."""

    averages = False

    def __init__(self, tree: GradientTree) -> None:
        self._tree = tree

    def begin(self) -> None:
        """Forgets the gradients of the step before."""
        self._tree.begin()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Takes the gradients of the pass as the next leaf."""
        del last
        yield
        self._tree.add()

    def finish(self) -> None:
        """Adds the sums of all ranks."""
        self._tree.finish()
