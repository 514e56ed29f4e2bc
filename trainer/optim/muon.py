"""Muon (Jordan et al., 2024) for many matrices at once: those of one shape are a stack, so that a GPU gets few large products.

M matrices of a stack   W ranks   S matrices of which a rank makes the products, M / W rounded up
R rows of a matrix      P rows of which a rank has the weights: R without FSDP    C columns
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainer.distributed.group import Group
from trainer.model.parameters import is_sharded, own_part
from trainer.optim.adamw import Optimizer

_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_LEAST_NORM = 1e-7
_MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Numbers in a stack, for each rank that shares its products: they stay in a CPU's cache, and need little of a GPU's memory."""


@dataclass(frozen=True)
class _Stack:
    matrices: Sequence[nn.Parameter]
    averages: Tensor  # of the gradients, (M, P, C): the state of the optimizer, in which each matrix has its part


class Muon(Optimizer):
    """Moves each matrix against an approximation of the semi-orthogonal matrix that is nearest to its averaged gradient.

    The update is multiplied by 0.2 sqrt(max(rows, columns)), which gives it the size of an AdamW update (Liu et al., 2025). A
    missing gradient counts as zero. If `found_inf`, a fp32 number on the device as in AdamW, is 1, every bit stays.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], momentum: float, ranks: Group | None = None) -> None:
        """`ranks` share the products, so the last bits depend on their number. None: this rank makes all, and has whole weights."""
        super().__init__(groups, {"momentum": momentum})
        self._ranks = None if ranks is None or ranks.world_size == 1 else ranks
        self._stacks = [(group, stack) for group in self.param_groups for stack in self._stacks_of(group["params"])]

    @torch.no_grad()
    def _stacks_of(self, matrices: Sequence[nn.Parameter]) -> list[_Stack]:
        alike: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            alike.setdefault(matrix.shape, []).append(matrix)
        ranks = 1 if self._ranks is None else self._ranks.world_size
        stacks = []
        for shape, those in alike.items():
            most = ranks * max(1, _MOST_NUMBERS[matrices[0].device.type] // shape.numel())
            for first in range(0, len(those), most):
                stack = those[first : first + most]
                averages = torch.stack([torch.zeros_like(own_part(one)) for one in stack])
                for matrix, average in zip(stack, averages, strict=True):
                    state = torch.zeros_like(matrix)
                    own_part(state).set_(average)  # its numbers are those of the stack
                    self.state[matrix] = {"momentum_buffer": state}
                stacks.append(_Stack(stack, averages))
        return stacks

    @torch.no_grad()
    def step(self) -> None:
        for group, stack in self._stacks:
            skip = stack.averages.new_zeros(()) if self.found_inf is None else self.found_inf
            self._update(stack, skip.bool(), group["lr"], group["lr"] * group["weight_decay"], group["momentum"])

    def _update(self, stack: _Stack, skip: Tensor, rate: float, shrink: float, momentum: float) -> None:
        first, average_MPC = stack.matrices[0], stack.averages
        none_PC = torch.zeros_like(average_MPC[0])
        gradient_MPC = torch.stack([none_PC if one.grad is None else own_part(one.grad) for one in stack.matrices])
        new_MPC = average_MPC.lerp(gradient_MPC, 1 - momentum)
        nesterov_MPC = gradient_MPC.lerp_(new_MPC, momentum).bfloat16()
        torch.where(skip, average_MPC, new_MPC, out=average_MPC)
        update_MPC = self._orthogonal(nesterov_MPC, len(first), sharded=is_sharded(first))
        update_MPC = torch.where(skip, 0.0, update_MPC)
        weights = [own_part(matrix) for matrix in stack.matrices]
        torch._foreach_mul_(weights, torch.where(skip, 1.0, 1 - shrink))
        # 0 times a negative factor is -0, the only number that changes no bit of any weight, also of -0.
        torch._foreach_add_(weights, update_MPC.float().unbind(), alpha=-0.2 * math.sqrt(max(first.shape)) * rate)

    def _orthogonal(self, update_MPC: Tensor, num_rows: int, *, sharded: bool) -> Tensor:
        if self._ranks is None:
            return orthogonalised(update_MPC)
        world, (num_matrices, num_own_rows, num_columns) = self._ranks.world_size, update_MPC.shape
        share = -(-num_matrices // world)
        more = share * world - num_matrices
        if not sharded:
            own_SRC = pad(update_MPC, (0, 0, 0, 0, 0, more))[share * self._ranks.rank :][:share]
            whole_MRC = own_SRC.new_empty(share * world, num_rows, num_columns)
            return self._ranks.gather(orthogonalised(own_SRC), whole_MRC)[:num_matrices]
        most_rows = -(-num_rows // world)  # of a rank under FSDP; the last ranks may have fewer, or none
        parts = pad(update_MPC, (0, 0, 0, most_rows - num_own_rows, 0, more)).view(world, share, most_rows, num_columns)
        received = self._ranks.exchange(parts, torch.empty_like(parts))  # from each rank its rows of this rank's matrices
        own_SRC = orthogonalised(received.transpose(0, 1).flatten(1, 2)[:, :num_rows])
        whole = pad(own_SRC, (0, 0, 0, most_rows * world - num_rows)).view(share, world, most_rows, num_columns)
        self._ranks.exchange(whole.transpose(0, 1).contiguous(), received)  # from each rank this rank's rows of its matrices
        return received.flatten(0, 1)[:num_matrices, :num_own_rows]


def orthogonalised(matrices_MRC: Tensor) -> Tensor:
    """Return about U V^T for each matrix U S V^T, in the type of `matrices_MRC`. Zeros stay zeros.

    Five Newton-Schulz iterations with Jordan's coefficients move the singular values to between 0.7 and 1.2.
    """
    norms = torch.linalg.vector_norm(matrices_MRC, dim=(1, 2), keepdim=True)
    x_MRC: Tensor = matrices_MRC / norms.clamp_(min=_LEAST_NORM)
    tall = x_MRC.shape[1] > x_MRC.shape[2]  # then the products with its own transpose are smaller on the other side
    for _ in range(_NUM_ITERATIONS):
        square = torch.bmm(x_MRC.mT, x_MRC) if tall else torch.bmm(x_MRC, x_MRC.mT)
        factor = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        left, right = (x_MRC, factor) if tall else (factor, x_MRC)
        x_MRC = torch.baddbmm(x_MRC, left, right, beta=_A)
    return x_MRC
