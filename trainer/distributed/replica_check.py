"""Compares the weights of the ranks: replicas that were updated alike are equal to the last bit, or something is broken.

A bit that flips in the memory of one rank makes no step bad at once; its weights only drift away from those of the others, and
what rank 0 saves is one of several truths. Each rank adds up the bit patterns of each tensor, and all see all sums. A flipped bit
changes a sum by a power of two, so one alone is always found.

    P parameters   R ranks
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import GuardError
from trainer.distributed.group import Group

__all__ = ["Difference", "ReplicaCheck", "bit_sums", "find_difference"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 24


@dataclass(frozen=True)
class Difference:
    """What is not the same on all ranks."""

    names: tuple[str, ...]
    """Of the tensors, in the order of the weights."""
    ranks: tuple[int, ...]
    """Those that differ from the majority; all where there is none."""

    def describe(self, step: int, agreed_step: int) -> str:
        """One line for people."""
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return (
            f"the weights of the ranks are no longer the same after step {step}: {self.names[0]}{others} on {who}; they last "
            f"agreed after step {agreed_step}. Most likely memory or a processor is broken: run a memory test there, or leave that "
            f"machine out, move checkpoints of later steps than {agreed_step} away, and run the same command again"
        )


def bit_sums(parameters: Mapping[str, Tensor]) -> Tensor:
    """The sum of the bit patterns of each tensor, read as integers and added modulo 2^64: (P,) int64 on their device.

    The host waits for nothing.
    """
    sums = [_sum(parameter.detach().contiguous().view(_INTEGERS[parameter.element_size()])) for parameter in parameters.values()]
    return torch.stack(sums)


def _sum(bits: Tensor) -> Tensor:
    """The sum of all elements as int64; in pieces, because torch widens what it adds before it does."""
    return torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(bits.flatten(), _PIECE)]).sum()


def find_difference(sums_RP: Tensor, names: tuple[str, ...]) -> Difference | None:
    """Which tensors differ between ranks, and on which of them; None where all agree."""
    differs_P = (sums_RP != sums_RP[:1]).any(dim=0)
    if not bool(differs_P.any()):
        return None
    wrong = tuple(name for name, differs in zip(names, differs_P.tolist(), strict=True) if differs)
    versions = [tuple(row) for row in sums_RP[:, differs_P].tolist()]
    (usual, number), *_ = Counter(versions).most_common(1)
    odd = tuple(rank for rank, version in enumerate(versions) if version != usual)
    return Difference(wrong, odd if 2 * number > len(versions) else tuple(range(len(versions))))


class ReplicaCheck:
    """Compares every few steps; the outcome of a comparison is read when the host reads the numbers of that step.

    Args:
        parameters: the weights by name, whole on every rank.
        group: the ranks; one alone has nothing to compare with.
        every_steps: steps between comparisons; 0: none.
        step: the last step done, at which the ranks agree because they have loaded the same.
    """

    def __init__(self, parameters: Mapping[str, Tensor], group: Group, every_steps: int, step: int = 0) -> None:
        self._parameters = parameters
        self._names = tuple(parameters)
        self._group = group
        self._every_steps = every_steps if group.world_size > 1 else 0
        self._agreed_step = step
        self._pending: deque[tuple[int, Tensor]] = deque()

    def due(self, step: int) -> bool:
        """Whether the weights after this step are to be compared."""
        return bool(self._every_steps) and step % self._every_steps == 0

    def begin(self, step: int) -> None:
        """Compares the weights as they are after `step`; to be called by all ranks, and the device does it when it comes to it."""
        own_P = bit_sums(self._parameters)
        all_RP = self._group.gather(own_P, own_P.new_empty(self._group.world_size * len(own_P)))
        self._pending.append((step, all_RP.view(self._group.world_size, -1)))

    def read(self, step: int) -> None:
        """Waits for the comparisons up to `step`.

        Raises:
            GuardError: on every rank; weights differ. No checkpoint later than the step that the message names can be trusted.
        """
        while self._pending and self._pending[0][0] <= step:
            compared, sums_RP = self._pending.popleft()
            if difference := find_difference(sums_RP.cpu(), self._names):
                raise GuardError(difference.describe(compared, self._agreed_step))
            self._agreed_step = compared

    def check(self, step: int) -> None:
        """Compares the weights as they are after `step`, and waits for it; nothing where comparisons are turned off.

        Raises:
            GuardError: see `read`.
        """
        if self._every_steps:
            self.begin(step)
            self.read(step)

    def drop_pending(self) -> None:
        """Drops comparisons that have not been read: their steps are made again."""
        self._pending.clear()

    def forget(self, step: int) -> None:
        """Goes back to a step whose checkpoint all ranks have loaded."""
        self._pending.clear()
        self._agreed_step = step
