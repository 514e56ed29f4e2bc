"""The training loss: cross-entropy of the next token, summed, in fp32.

For a position with logits x, target t, weight w and `lse = log sum exp(x)`, the loss is

    w * ((1 - s) (lse - x_t) + s (lse - mean(x)) + z lse^2)

with label smoothing s (Szegedy et al., 2016) and z-loss z (Chowdhery et al., 2022); x is divided by the temperature first. Rows of
the output projection beyond the tokenizer's vocabulary count as pieces like all others.

`linear_cross_entropy_sum` starts from hidden states and computes the logits of one chunk of positions at a time, because the logits
of a whole micro-batch often take more memory than all activations of the layers. It computes the gradient of a chunk while the
chunk's logits exist, so nothing is computed twice. `cross_entropy_sum` is the plain form for logits that exist already.

B rows   L tokens of a row   N positions, all of B and L   C positions of a chunk   D width   V vocabulary, padded
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config import LossConfig
from trainer.data.batch import IGNORE
from trainer.model.cost import FP32_BYTES
from trainer.model.linear import add_product, product
from trainer.model.operators import has_kernels, loss_and_slopes_

_PLAIN = LossConfig()
_CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
_EVALUATION_TOKENS = 256
_EVALUATION_TOKENS_ON_GPU = 4096  # in 16 bits: a compiled model contains the products of all chunks
_CHUNKS_IN_PLACE = 4
"""The kernel for GPUs takes this many times more positions at a time in the same memory, because it keeps no fp32 logits."""
_FP16_SCALE = 256.0
"""The loss's derivative is multiplied by this before it is rounded to fp16, whose smallest number, 6e-8, is too large for the
derivatives of unlikely pieces."""


def cross_entropy_sum(
    logits_BLV: Tensor, targets_BL: Tensor, weights_BL: Tensor | None = None, settings: LossConfig = _PLAIN
) -> Tensor:
    """Return the sum of the loss over all targets in nats, a fp32 scalar (fp64 for fp64 logits).

    It is the sum and not the mean: the caller divides by the number of targets of the whole global batch, so the result does not
    depend on how the batch is cut into micro-batches. Positions whose target is IGNORE have none. A mask is a weight of 0 or 1.
    """
    targets_N = targets_BL.flatten()
    logits_NV = logits_BLV.flatten(0, 1).to(_wide(logits_BLV.dtype)) / settings.temperature
    losses_N = functional.cross_entropy(
        logits_NV, targets_N, ignore_index=IGNORE, reduction="none", label_smoothing=settings.label_smoothing
    )
    if settings.z_loss:
        losses_N = losses_N + settings.z_loss * logits_NV.logsumexp(dim=1).square() * (targets_N != IGNORE)
    if weights_BL is not None:
        losses_N = losses_N * weights_BL.flatten()
    return losses_N.sum()


def cross_entropy_rows(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return each position's cross-entropy without smoothing, z-loss or temperature, (B, L), fp32; 0 if it has no target."""
    losses = functional.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets_BL)


def linear_cross_entropy_sum(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    targets_BL: Tensor,
    settings: LossConfig = _PLAIN,
    weights_BL: Tensor | None = None,
    *,
    softcap: float = 0.0,
) -> Tensor:
    """Return `cross_entropy_sum` of the logits `soft_cap(hidden @ weight^T)`, for `settings.chunk_tokens` positions at a time.

    Matrix products are in the type of autocast if it is on, else in the type of `hidden_BLD`. Everything else, including the sum of
    the weight's gradient over chunks, is in fp32. The gradient cannot be differentiated again. Another `chunk_tokens` gives the
    same sum up to rounding.
    """
    kept_N = targets_BL.flatten() != IGNORE
    weights_N = torch.ones_like(kept_N, dtype=torch.float32) if weights_BL is None else weights_BL.detach().flatten()
    product_type = _product_type(hidden_BLD)
    in_place = torch.is_grad_enabled() and has_kernels(hidden_BLD.device.type, product_type) and not softcap
    plan = _Plan(
        settings.label_smoothing,
        settings.z_loss,
        settings.temperature,
        _chunk_tokens(settings, weight_VD.shape[0], hidden_BLD.device.type, in_place=in_place),
        product_type,
        torch.is_grad_enabled(),
        in_place,
        softcap,
    )
    loss = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_BLD.flatten(0, 1),
        weight_VD,
        torch.where(kept_N, targets_BL.flatten(), 0),
        torch.where(kept_N, weights_N.to(_wide(plan.product_type)), 0.0),
        plan,
    )
    return cast(Tensor, loss)


@torch.no_grad()
def linear_cross_entropy_rows(hidden_BLD: Tensor, weight_VD: Tensor, targets_BL: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Return `cross_entropy_rows` of the logits `soft_cap(hidden @ weight^T)`, (B, L), fp32, in chunks and without gradients.

    All matrix products have the same shape, so the values of a row do not depend on the other rows of the batch.
    """
    device, product_type = hidden_BLD.device.type, _product_type(hidden_BLD)
    most = _EVALUATION_TOKENS_ON_GPU if has_kernels(device, product_type) else _EVALUATION_TOKENS
    size = min(most, default_chunk_tokens(weight_VD.shape[0], device))
    plan = _Plan(0.0, 0.0, 1.0, size, product_type, False, False, softcap)
    weight_VD = weight_VD.to(plan.product_type)
    losses = []
    with torch.autocast(hidden_BLD.device.type, enabled=False):
        for hidden_CD, targets_C in equal_chunks(hidden_BLD, targets_BL, size):
            chosen_C1 = torch.where(targets_C == IGNORE, 0, targets_C)[:, None]
            loss_C, _ = _losses_and_slopes(hidden_CD.to(plan.product_type), weight_VD, chosen_C1, plan, want_slopes=False)
            losses.append(torch.where(targets_C == IGNORE, 0.0, loss_C))
    return torch.cat(losses)[: targets_BL.numel()].view_as(targets_BL).float()


def equal_chunks(hidden_BLD: Tensor, targets_BL: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return states and targets of `size` positions at a time. The last chunk is padded with positions without a target."""
    beyond = -targets_BL.numel() % size
    hidden_ND = functional.pad(hidden_BLD.flatten(0, 1), (0, 0, 0, beyond))
    targets_N = functional.pad(targets_BL.flatten(), (0, beyond), value=IGNORE)
    return zip(torch.split(hidden_ND, size), torch.split(targets_N, size), strict=True)


def _chunk_tokens(settings: LossConfig, vocab_size: int, device_type: str, *, in_place: bool) -> int:
    return settings.chunk_tokens or default_chunk_tokens(vocab_size, device_type) * (_CHUNKS_IN_PLACE if in_place else 1)


def default_chunk_tokens(vocab_size: int, device_type: str = "cpu") -> int:
    """Return the largest power of two of positions, at least 64, whose fp32 logits take at most 16 MiB on a CPU, 1 GiB on a GPU.

    On a CPU larger chunks do not fit into the caches. On a GPU each chunk adds to the fp32 gradient of the whole projection: with
    50,304 pieces a pass took 88.3 ms in chunks of 1,024 positions, and 81.8 ms in chunks of 8,192 (H100, 124M weights, 2026-11-23).
    """
    fitting = _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cuda"]) // (4 * vocab_size)
    return 1 << max(6, fitting.bit_length() - 1)


def loss_bytes(
    settings: LossConfig,
    width: int,
    vocab_size: int,
    num_tokens: int,
    device_type: str,
    *,
    mixed: bool,
    frozen: bool = False,
    softcap: float = 0.0,
) -> int:
    """Return the most bytes that `linear_cross_entropy_sum` and its gradients hold at one time.

    These are the logits of a chunk and their softmax in fp32, with mixed precision both also in 16 bits, or on a GPU only the
    logits in 16 bits; with a soft cap its derivative in fp32;
    the gradient of every hidden state, twice while it is concatenated or multiplied; the gradient of the output
    projection, also twice, unless it is `frozen`; and with mixed precision the cast projection.
    """
    in_place = device_type == "cuda" and mixed and not softcap
    chunk_tokens = min(_chunk_tokens(settings, vocab_size, device_type, in_place=in_place), num_tokens)
    logit_bytes = 2 if in_place else ((3 if mixed else 2) + (1 if softcap else 0)) * FP32_BYTES
    return (
        logit_bytes * vocab_size * chunk_tokens
        + 2 * FP32_BYTES * width * num_tokens
        + vocab_size * width * ((0 if frozen else 2 * FP32_BYTES) + (2 if mixed else 0))
    )


class _Plan(NamedTuple):
    label_smoothing: float
    z_loss: float
    temperature: float
    chunk_tokens: int
    product_type: torch.dtype
    differentiable: bool
    in_place: bool
    softcap: float


class _LinearCrossEntropy(torch.autograd.Function):
    """The weighted sum. `forward` computes the gradients up to a factor, and `backward` multiplies by it.

    Until then gradients stay in fp32, also those of fp16 states: `backward` multiplies by the loss scale, which may be 65,536,
    before it rounds to fp16. `chosen_N` is always a valid id; `weights_N` is 0 at positions without a target.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, chosen_N: Tensor, weights_N: Tensor, plan: _Plan) -> Tensor:
        for_hidden, for_weight = (plan.differentiable and needed for needed in ctx.needs_input_grad[:2])
        wide, size = weights_N.dtype, plan.chunk_tokens
        largest = weights_N.abs().amax().clamp_min(torch.finfo(wide).tiny)
        shares_N1 = (weights_N / largest)[:, None]  # at most 1 for weights of any size, so fp16 can hold them
        projection_VD = weight_VD.to(plan.product_type)
        grad_weight_VD: Tensor | None = None
        losses, grads_hidden = [], []
        with torch.autocast(hidden_ND.device.type, enabled=False):
            for states_CD, chosen_C, shares_C1 in zip(
                torch.split(hidden_ND, size), torch.split(chosen_N, size), torch.split(shares_N1, size), strict=True
            ):
                hidden_CD = states_CD.to(plan.product_type)
                loss_C, slopes_CV = _losses_and_slopes(
                    hidden_CD, projection_VD, chosen_C[:, None], plan, want_slopes=for_hidden or for_weight
                )
                losses.append(loss_C)
                if slopes_CV is not None and for_hidden:
                    grads_hidden.append(_wide_product(slopes_CV, projection_VD) * shares_C1)
                if slopes_CV is not None and for_weight:
                    shared_CD = (hidden_CD * shares_C1).to(plan.product_type)
                    if shared_CD.dtype == wide:
                        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if grad_weight_VD is None else grad_weight_VD
                        add_product(grad_weight_VD, slopes_CV.T, shared_CD.T)
                    else:
                        part_VD = _wide_product(slopes_CV.T, shared_CD)
                        grad_weight_VD = part_VD if grad_weight_VD is None else grad_weight_VD.add_(part_VD)
        factor = largest / (plan.temperature * _slope_scale(plan.product_type))
        ctx.save_for_backward(torch.cat(grads_hidden) if for_hidden else None, grad_weight_VD, factor)
        ctx.input_types = hidden_ND.dtype, weight_VD.dtype
        return (weights_N * torch.cat(losses)).sum(dtype=torch.float64).to(wide)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        *gradients, factor = ctx.saved_tensors
        factor = factor * incoming
        hidden, weight = (
            None if gradient is None else (gradient * factor).to(kind)
            for gradient, kind in zip(gradients, ctx.input_types, strict=True)
        )
        return hidden, weight, None, None, None


def _losses_and_slopes(
    hidden_CD: Tensor, weight_VD: Tensor, chosen_C1: Tensor, plan: _Plan, *, want_slopes: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the unweighted loss of each position, (C,), and its derivative by the logits, (C, V), in the type of matrix products.

    The derivative is taken by the logits times the temperature, before a soft cap, and multiplied by `_slope_scale`.
    """
    wide, smoothing = _wide(plan.product_type), plan.label_smoothing
    logits_CV = product(hidden_CD, weight_VD)
    if plan.in_place and want_slopes:
        scale = _slope_scale(plan.product_type)
        return loss_and_slopes_(logits_CV, chosen_C1.squeeze(1), smoothing, plan.z_loss, plan.temperature, scale), logits_CV
    bend_CV = None
    if plan.softcap:
        capped_CV = (logits_CV.to(wide) / plan.softcap).tanh_()
        bend_CV = 1 - capped_CV.square() if want_slopes else None
        logits_CV = capped_CV.mul_(plan.softcap)
    if plan.temperature != 1:
        logits_CV = logits_CV.to(wide) / plan.temperature
    own_C1 = logits_CV.gather(1, chosen_C1).to(wide)
    highest_C1 = logits_CV.amax(dim=1, keepdim=True).to(wide)
    mean_C1 = logits_CV.mean(dim=1, keepdim=True, dtype=wide) if smoothing else None
    # In place if the type allows it, because allocating this much memory takes as long as the exponentials.
    probabilities_CV = (
        torch.softmax(logits_CV, dim=1, out=logits_CV) if logits_CV.dtype == wide else logits_CV.softmax(dim=1, dtype=wide)
    )
    # The likeliest piece has a probability of at least 1/V, so its logarithm is accurate. That of another piece could be log(0).
    lse_C1 = highest_C1 - probabilities_CV.amax(dim=1, keepdim=True).log()
    loss_C1 = lse_C1 - own_C1
    if mean_C1 is not None:
        loss_C1 = loss_C1 + smoothing * (own_C1 - mean_C1)
    if plan.z_loss:
        loss_C1 = loss_C1 + plan.z_loss * lse_C1.square()
    if not want_slopes:
        return loss_C1.squeeze(1), None
    slopes_CV = probabilities_CV
    if plan.z_loss:
        slopes_CV.mul_(1 + 2 * plan.z_loss * lse_C1)
    if smoothing:
        slopes_CV.sub_(smoothing / weight_VD.shape[0])
    slopes_CV.scatter_(1, chosen_C1, slopes_CV.gather(1, chosen_C1) - (1 - smoothing))
    if bend_CV is not None:
        slopes_CV.mul_(bend_CV)
    if (scale := _slope_scale(plan.product_type)) != 1:
        slopes_CV.mul_(scale)
    return loss_C1.squeeze(1), slopes_CV.to(plan.product_type)


def _product_type(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _wide(kind: torch.dtype) -> torch.dtype:
    return torch.promote_types(kind, torch.float32)


def _slope_scale(kind: torch.dtype) -> float:
    return _FP16_SCALE if kind == torch.float16 else 1.0


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b` in fp32 at least. On a CPU the product of bf16 numbers is first rounded to bf16, as in `nn.Linear`."""
    if a.dtype not in (torch.float16, torch.bfloat16):
        return product(a, b.T)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.dtype == torch.float16:  # the sum over positions may exceed the largest fp16 number
        return a.float() @ b.float()
    return (a @ b).float()
