"""Kernels for GPUs in Triton. `trainer.model.operators` makes operators of them; import this module only where Triton is installed.

Each program adds in a fixed order and no two programs add to one number, so the results have the same bits each time.

C positions   V vocabulary   R rows, one for each head of each token   H width of a head
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOSS_BLOCK, _LOSS_WARPS = 8192, 16  # the best of 20 choices for 50,304 pieces (H100, 2026-11-27)
_ROWS = 32
_CHUNK = 32  # tokens of a program that adds the gradient of an embedding
_PROGRAMS = 1024  # of the backward pass of a norm. The gradient of its weight depends on this number.


def loss_and_slopes_(
    logits_CV: Tensor, chosen_C: Tensor, smoothing: float, z_loss: float, temperature: float, slope_scale: float
) -> Tensor:
    """Return the loss of `trainer.model.loss` for each position, (C,), fp32, and overwrite the contiguous logits.

    The logits are read twice, the second time largely from the L2 cache, and written once.
    """
    losses_C = torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)
    _loss[(len(logits_CV),)](
        *(logits_CV, chosen_C, losses_C, smoothing, z_loss, 1 / temperature, slope_scale),
        V=logits_CV.shape[1],
        SMOOTHS=smoothing > 0,
        BLOCK=min(_LOSS_BLOCK, triton.next_power_of_2(logits_CV.shape[1])),
        num_warps=_LOSS_WARPS,
    )
    return losses_C


def norm_and_rotate(x: Tensor, weight_H: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm and then rotation of contiguous `x`, (B, L, N, H), and the factors of the norm, (R,), fp32.

    `cos`, (B, L, 1, H), and `sin`, (B, L, 1, H / 2), are those of `layers.rotary_table`.
    """
    y, num_rows = torch.empty_like(x), x.numel() // x.shape[-1]
    factors_R = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    half = x.shape[-1] // 2
    _norm_and_rotate[(triton.cdiv(num_rows, _ROWS),)](
        *(x, weight_H, cos, sin, y, factors_R, eps, num_rows),
        HEADS=x.shape[2],
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        ROWS=_ROWS,
    )
    return y, factors_R


def norm_and_rotate_backward(
    grad: Tensor, x: Tensor, weight_H: Tensor, cos: Tensor, sin: Tensor, factors_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients by `x` and by the weight, fp32."""
    grad_x, num_rows, half = torch.empty_like(x), factors_R.numel(), x.shape[-1] // 2
    parts_PH = torch.empty(_PROGRAMS, 2 * half, dtype=torch.float32, device=x.device)
    _norm_and_rotate_backward[(_PROGRAMS,)](
        *(grad, x, weight_H, cos, sin, factors_R, grad_x, parts_PH, num_rows),
        HEADS=x.shape[2],
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        ROWS=_ROWS,
        ROUNDS=triton.cdiv(num_rows, _ROWS * _PROGRAMS),
    )
    return grad_x, parts_PH.sum(0)


def embedding_gradient(ids_T: Tensor, grad_TD: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of an embedding's weight, (num_rows, D), fp32: the sum of `grad_TD` over the tokens of each id.

    Tokens are sorted by id, and each program adds a few of them. An id that goes on in later parts is added up afterwards.
    """
    sorted_ids_T, order_T = ids_T.sort(stable=True)
    num_tokens, width = grad_TD.shape
    grad_weight_VD = torch.zeros(num_rows, width, dtype=torch.float32, device=grad_TD.device)
    num_chunks, block = triton.cdiv(num_tokens, _CHUNK), min(1024, triton.next_power_of_2(width))
    carried = torch.empty(num_chunks, width, dtype=torch.float32, device=grad_TD.device)
    grid, sizes = (num_chunks, triton.cdiv(width, block)), {"D": width, "BLOCK": block, "CHUNK": _CHUNK}
    _embedding_gradient[grid](sorted_ids_T, order_T, grad_TD, grad_weight_VD, carried, num_tokens, **sizes)
    _carry[grid](sorted_ids_T, grad_weight_VD, carried, num_tokens, **sizes)
    return grad_weight_VD


@triton.jit
def _loss(
    logits, chosen, losses, smoothing, z_loss, factor, slope_scale, V: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * V
    target = tl.load(chosen + row)
    highest, total, mean = -float("inf"), 0.0, 0.0
    for begin in range(0, V, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(first + place, mask=place < V, other=-float("inf")).to(tl.float32) * factor
        higher = tl.maximum(highest, tl.max(x, 0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
        highest = higher
        if SMOOTHS:
            mean += tl.sum(tl.where(place < V, x, 0.0), 0)
    lse = highest + tl.log(total)
    own = tl.load(first + target).to(tl.float32) * factor
    loss = lse - own + z_loss * lse * lse
    if SMOOTHS:
        loss += smoothing * (own - mean / V)
    tl.store(losses + row, loss)
    tl.debug_barrier()  # the row's own logit is read before it is overwritten
    for begin in range(0, V, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        x = tl.load(first + place, mask=place < V, other=-float("inf")).to(tl.float32) * factor
        slope = tl.exp(x - lse) * (1 + 2 * z_loss * lse) - smoothing / V - tl.where(place == target, 1 - smoothing, 0.0)
        tl.store(first + place, (slope * slope_scale).to(logits.dtype.element_ty), mask=place < V)


@triton.jit
def _norm_and_rotate(
    x, weight, cos, sin, y, factors, eps, num_rows, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    inside, token = (row < num_rows) & (place < HALF), row // HEADS
    at = row * (2 * HALF) + place
    first, second = tl.load(x + at, inside, 0.0).to(tl.float32), tl.load(x + at + HALF, inside, 0.0).to(tl.float32)
    factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
    first = first * factor * tl.load(weight + place, place < HALF, 0.0)
    second = second * factor * tl.load(weight + HALF + place, place < HALF, 0.0)
    c, s = tl.load(cos + token * (2 * HALF) + place, inside, 0.0), tl.load(sin + token * HALF + place, inside, 0.0)
    tl.store(y + at, (first * c - second * s).to(y.dtype.element_ty), inside)
    tl.store(y + at + HALF, (second * c + first * s).to(y.dtype.element_ty), inside)
    tl.store(factors + row, factor, row < num_rows)


@triton.jit
def _norm_and_rotate_backward(
    grad,
    x,
    weight,
    cos,
    sin,
    factors,
    grad_x,
    parts,
    num_rows,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    place = tl.arange(0, BLOCK)[None, :]
    first_weight = tl.load(weight + place, place < HALF, 0.0)
    second_weight = tl.load(weight + HALF + place, place < HALF, 0.0)
    first_part, second_part = tl.zeros((1, BLOCK), tl.float32), tl.zeros((1, BLOCK), tl.float32)
    for turn in range(ROUNDS):
        row = ((tl.program_id(0) * ROUNDS + turn) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside, token = (row < num_rows) & (place < HALF), row // HEADS
        at = row * (2 * HALF) + place
        c, s = tl.load(cos + token * (2 * HALF) + place, inside, 0.0), tl.load(sin + token * HALF + place, inside, 0.0)
        by_first, by_second = tl.load(grad + at, inside, 0.0).to(tl.float32), tl.load(grad + at + HALF, inside, 0.0).to(tl.float32)
        first_slope, second_slope = by_first * c + by_second * s, by_second * c - by_first * s
        factor = tl.load(factors + row, row < num_rows, 0.0)
        first = tl.load(x + at, inside, 0.0).to(tl.float32) * factor
        second = tl.load(x + at + HALF, inside, 0.0).to(tl.float32) * factor
        first_part += tl.sum(first_slope * first, 0)[None, :]
        second_part += tl.sum(second_slope * second, 0)[None, :]
        first_slope, second_slope = first_slope * first_weight, second_slope * second_weight
        mean = ((tl.sum(first_slope * first, 1) + tl.sum(second_slope * second, 1)) / (2 * HALF))[:, None]
        tl.store(grad_x + at, ((first_slope - first * mean) * factor).to(grad_x.dtype.element_ty), inside)
        tl.store(grad_x + at + HALF, ((second_slope - second * mean) * factor).to(grad_x.dtype.element_ty), inside)
    at = tl.program_id(0) * (2 * HALF) + place
    tl.store(parts + at, first_part, place < HALF)
    tl.store(parts + at + HALF, second_part, place < HALF)


@triton.jit
def _embedding_gradient(
    sorted_ids, order, grad, grad_weight, carried, num_tokens, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    chunk, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    total = tl.zeros((BLOCK,), tl.float32)
    continued = (begin > 0) & (tl.load(sorted_ids + tl.maximum(begin - 1, 0)) == tl.load(sorted_ids + begin))
    for step in range(CHUNK):
        at = begin + step
        if at < num_tokens:
            own = tl.load(sorted_ids + at)
            total += tl.load(grad + tl.load(order + at) * D + place, place < D, 0.0).to(tl.float32)
            following = tl.load(sorted_ids + tl.minimum(at + 1, num_tokens - 1))
            if (following != own) | (step + 1 == CHUNK) | (at + 1 == num_tokens):
                tl.store(carried + chunk.to(tl.int64) * D + place, total, (place < D) & continued)
                tl.store(grad_weight + own * D + place, total, (place < D) & (continued == 0))
                total = tl.zeros((BLOCK,), tl.float32)
                continued = continued & (step < 0)  # no id but the first goes on from the chunk before


@triton.jit
def _carry(sorted_ids, grad_weight, carried, num_tokens, D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    # The sum of the chunk in which an id begins takes those of the chunks in which it goes on.
    chunk, place = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = (chunk + 1) * CHUNK - 1
    own = tl.load(sorted_ids + tl.minimum(last, num_tokens - 1))
    begins_here = (chunk == 0) | (tl.load(sorted_ids + tl.maximum(chunk * CHUNK - 1, 0)) != own)
    goes_on = (last + 1 < num_tokens) & (tl.load(sorted_ids + tl.minimum(last + 1, num_tokens - 1)) == own)
    if begins_here & goes_on:
        total = tl.load(grad_weight + own * D + place, place < D, 0.0)
        following = chunk + 1
        while (following * CHUNK < num_tokens) & (tl.load(sorted_ids + tl.minimum(following * CHUNK, num_tokens - 1)) == own):
            total += tl.load(carried + following.to(tl.int64) * D + place, place < D, 0.0)
            following += 1
        tl.store(grad_weight + own * D + place, total, place < D)
