"""An operator that computes on a CPU what the kernel of `varlen` attention computes on a GPU, forward and backward.

For torch.compile it is as opaque as that kernel. T tokens   N query heads   K key and value heads   G query heads of a key head
H width of a head   S tokens that are looked at   M bounds of documents
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.model import attention
from trainer.model.attention import document_mask


def use_varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend `varlen` run on a CPU."""
    monkeypatch.setattr(attention, "_varlen_attention", lambda: _attention)


def _attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor, max_length: int, window: int) -> Tensor:
    del max_length
    return varlen(q_TNH, k_TKH, v_TKH, bounds_M, window)


@torch.library.custom_op("trainer_tests::varlen", mutates_args=())
def varlen(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor, window: int) -> Tensor:
    q_KGTH, weights_KGTS = _weights(q_TNH, k_TKH, bounds_M, window)
    return _heads_last(torch.einsum("kgts,skh->kgth", weights_KGTS, v_TKH), q_KGTH.shape[2])


@torch.library.custom_op("trainer_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    q_KGTH, weights_KGTS = _weights(q_TNH, k_TKH, bounds_M, window)
    grad_KGTH = _groups(grad_TNH, k_TKH.shape[1])
    grad_weights = torch.einsum("kgth,skh->kgts", grad_KGTH, v_TKH)
    grad_scores = weights_KGTS * (grad_weights - (grad_weights * weights_KGTS).sum(-1, keepdim=True)) / q_TNH.shape[-1] ** 0.5
    return (
        _heads_last(torch.einsum("kgts,skh->kgth", grad_scores, k_TKH), len(q_TNH)),
        torch.einsum("kgts,kgth->skh", grad_scores, q_KGTH).contiguous(),
        torch.einsum("kgts,kgth->skh", weights_KGTS, grad_KGTH).contiguous(),
    )


def _groups(x_TNH: Tensor, num_kv_heads: int) -> Tensor:
    return x_TNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _heads_last(x_KGTH: Tensor, num_tokens: int) -> Tensor:
    return x_KGTH.permute(2, 0, 1, 3).reshape(num_tokens, -1, x_KGTH.shape[-1]).contiguous()


def _weights(q_TNH: Tensor, k_TKH: Tensor, bounds_M: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Queries by group, and the softmax over the earlier tokens of the same document, the last `window` ones if it is not 0."""
    documents_T = torch.searchsorted(bounds_M.long(), torch.arange(len(q_TNH)), right=True)
    q_KGTH = _groups(q_TNH, k_TKH.shape[1])
    scores = torch.einsum("kgth,skh->kgts", q_KGTH, k_TKH) / q_TNH.shape[-1] ** 0.5
    seen_TS = document_mask(documents_T[None])[0, 0]
    if window:
        seen_TS = seen_TS & torch.ones_like(seen_TS).triu(1 - window)
    return q_KGTH, scores.masked_fill(~seen_TS, float("-inf")).softmax(-1)


@varlen.register_fake
def _(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor, window: int) -> Tensor:
    return torch.empty_like(q_TNH)


@varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *varlen_backward(grad, *ctx.saved_tensors, ctx.window), None, None


varlen.register_autograd(_backward, setup_context=_save)
