"""Compares the weights of the ranks: replicas with the same updates are equal bit for bit, unless hardware is broken.

A flipped bit in the memory of one rank makes no step fail at once. The weights of that rank drift away from the others, and
checkpoints hold only the weights of rank 0. Each rank adds up the bit patterns of each tensor, and all ranks compare the sums. A
flipped bit changes a sum by a power of two, so a single flip is always found.

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

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 1 << 24


@dataclass(frozen=True)
class ReplicaDifference:
    names: tuple[str, ...]  # names of the tensors, in the order of the weights
    ranks: tuple[int, ...]  # ranks that differ from the majority; all ranks if there is no majority

    def describe(self, step: int, agreed_step: int) -> str:
        others = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        who = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return (
            f"the weights of the ranks are no longer the same after step {step}: {self.names[0]}{others} on {who}; they were last "
            f"equal after step {agreed_step}. Probably memory or a processor is broken: run a memory test on that machine or leave "
            f"it out, move checkpoints of steps after {agreed_step} away, and run the same command again"
        )


def bit_sums(parameters: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the bit patterns of each tensor, read as integers and added modulo 2^64: (P,) int64 on their device."""
    sums = []
    for parameter in parameters.values():
        bits = parameter.detach().contiguous().view(_INTEGERS[parameter.element_size()]).flatten()
        # in pieces, because torch converts its whole input to int64 first
        sums.append(torch.stack([piece.sum(dtype=torch.int64) for piece in torch.split(bits, _PIECE)]).sum())
    return torch.stack(sums)


def find_difference(sums_RP: Tensor, names: tuple[str, ...]) -> ReplicaDifference | None:
    differs_P = (sums_RP != sums_RP[:1]).any(dim=0)
    if not bool(differs_P.any()):
        return None
    wrong = tuple(name for name, differs in zip(names, differs_P.tolist(), strict=True) if differs)
    versions = [tuple(row) for row in sums_RP[:, differs_P].tolist()]
    (usual, number), *_ = Counter(versions).most_common(1)
    odd = tuple(rank for rank, version in enumerate(versions) if version != usual)
    return ReplicaDifference(wrong, odd if 2 * number > len(versions) else tuple(range(len(versions))))


class ReplicaCheck:
    """Compares weights every `every_steps` steps. The host reads a comparison when it reads the results of that step."""

    def __init__(self, parameters: Mapping[str, Tensor], group: Group, every_steps: int, step: int = 0) -> None:
        self._parameters = parameters
        self._names = tuple(parameters)
        self._group = group
        self._every_steps = every_steps if group.world_size > 1 else 0
        self._agreed_step = step
        self._pending: deque[tuple[int, Tensor]] = deque()

    def due(self, step: int) -> bool:
        return bool(self._every_steps) and step % self._every_steps == 0

    def begin(self, step: int) -> None:
        own_P = bit_sums(self._parameters)
        all_RP = self._group.gather(own_P, own_P.new_empty(self._group.world_size * len(own_P)))
        self._pending.append((step, all_RP.view(self._group.world_size, -1)))

    def read(self, step: int) -> None:
        """Wait for the comparisons up to `step`. Raises GuardError on every rank if weights differ."""
        while self._pending and self._pending[0][0] <= step:
            compared, sums_RP = self._pending.popleft()
            if difference := find_difference(sums_RP.cpu(), self._names):
                raise GuardError(difference.describe(compared, self._agreed_step))
            self._agreed_step = compared

    def check(self, step: int) -> None:
        if self._every_steps:
            self.begin(step)
            self.read(step)

    def drop_pending(self) -> None:
        self._pending.clear()

    def forget(self, step: int) -> None:
        self._pending.clear()
        self._agreed_step = step
