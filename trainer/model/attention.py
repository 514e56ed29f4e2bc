"""Causal attention that stays inside each document of a packed row.

B rows   L tokens of a row   N query heads   K key and value heads   H width of a head   T tokens of a micro-batch, B x L
M bounds of documents

Four backends compute the same result. `choose_backend` takes the fastest one that this machine can run:

    varlen     CUDA, 16-bit: flash attention that gets the first token of each document (`torch.nn.attention.varlen`)
    flex       CUDA, any precision: a kernel generated for the mask (`torch.nn.attention.flex_attention`)
    documents  CPU: one document at a time, so the time grows with the square of a document's length, not of the row's
    sdpa       anywhere: `scaled_dot_product_attention` with a mask over all pairs of a row's tokens

Under `torch.use_deterministic_algorithms(True)` the backward pass of every backend is deterministic, according to PyTorch's source
code (`cuda/attention_backward.cu`, `_inductor/kernel/flex/templates`). With `warn_only=True` flash attention and the
memory-efficient kernel of `sdpa` are not.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from common.errors import ConfigError
from trainer.config import ModelConfig, TrainConfig
from trainer.model.cost import FP32_BYTES, ActivationBytes, computed_bytes
from trainer.model.dropout import HASH_BYTES, ScoreChange, attention_by_formula, documents_by_formula, doubled_keys
from trainer.model.formula import causal_mask, soft_cap

Backend = Literal["varlen", "flex", "documents", "sdpa"]
VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""Causal attention over documents, from queries (T, N, H), keys and values (T, K, H), bounds (M,), longest length and window to
(T, N, H)."""

BACKENDS: dict[Backend, str] = {
    "varlen": "varlen (flash attention over documents of any length)",
    "flex": "flex (a kernel generated for the documents' mask)",
    "documents": "documents (one document at a time)",
    "sdpa": "sdpa (scaled dot product with a mask)",
}
_VARLEN_MODULE = "torch.nn.attention.varlen"
_HALF_PRECISIONS = ("bf16", "fp16", "float8")
_MAX_FLASH_HEAD, _FLASH_HEAD_MULTIPLE, _MIN_FLEX_HEAD = 256, 8, 16
_HOPPER = (9, 0)
_FLEX_BLOCK, _WIDEST_FLEX, _WIDEST_TUNED = 128, 128, 64
_FLEX_ON_HOPPER = {
    **{"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
    **{"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_warps": 4, "bwd_num_stages": 3},
}
"""Tiles for 16 bits and heads of up to 64 numbers, the best of 14 choices: 1.08 ms instead of 1.22 ms (H100, 2026-11-27)."""


@dataclass(frozen=True)
class Capability:
    cuda: tuple[int, int] | None
    has_varlen: bool = True
    has_triton: bool = True
    has_varlen_windows: bool = True


class Layout(NamedTuple):
    """The documents of a micro-batch, in the form that one backend needs.

    This is a tuple because torch.compile, DDP and activation checkpointing find tensors in tuples but not in dataclasses.
    """

    positions_BL: Tensor
    """int64 position of each token in its document."""
    mask_B1LL: Tensor | None = None
    bounds_M: Tensor | None = None
    """For `varlen`: int32 first token of each document in the flattened micro-batch; T fills the rest of the fixed size."""
    max_length: int = 0
    """For `varlen`: L, which no document exceeds. The longest document's length would make torch.compile compile each length."""
    varlen: VarlenAttention | None = None
    """For `varlen`: the kernel, because an import inside a compiled model breaks its graph."""
    block_mask: BlockMask | None = None
    """For `flex`: the same mask by blocks."""
    lengths: tuple[int, ...] = ()
    """For `documents`: tokens of each document, in order; they add up to T."""
    keys_B: Tensor | None = None
    """For dropout: the keys of the rows, in a layer those of the rows in this layer; None: no dropout."""
    slots_BT: Tensor | None = None
    """For a cache: the slot of each query; None: a query stands where its own key does."""
    window: int = 0
    """For `varlen` and `documents`: the last tokens of its document that a token sees, itself included; 0: all."""
    window_blocks: BlockMask | None = None
    """For `flex`: the block mask of the layers with a window."""


def capability_of(device: torch.device) -> Capability:
    if device.type != "cuda":
        return Capability(None)
    has_varlen, has_triton = (importlib.util.find_spec(module) is not None for module in (_VARLEN_MODULE, "triton"))
    has_windows = has_varlen and "window_size" in inspect.signature(importlib.import_module(_VARLEN_MODULE).varlen_attn).parameters
    return Capability(torch.cuda.get_device_capability(device), has_varlen, has_triton, has_windows)


def backend_of(config: TrainConfig, device: torch.device, *, trains: bool = True) -> Backend:
    model = config.model
    return choose_backend(
        *(config.attention, device, config.number_format, model.head_size),
        compiled=trains and config.compiles(device.type),
        dropout=model.attention_dropout if trains else 0.0,
        window=model.window,
        softcap=model.attention_softcap,
    )


def choose_backend(
    wanted: Literal["auto"] | Backend,
    device: torch.device,
    precision: str,
    head_size: int,
    *,
    compiled: bool = False,
    dropout: float = 0.0,
    window: int = 0,
    softcap: float = 0.0,
    capability: Capability | None = None,
) -> Backend:
    """Return the backend that is set, or for `auto` the first of varlen, flex, documents, sdpa that can run.

    In a compiled model on a Hopper GPU it is flex, because varlen has no kernels for this generation. Forward and backward of 32
    rows of 1,024 tokens, 12 heads of 64, took 1.4 instead of 1.7 ms, and of 8 rows of 4,096, 16 heads of 128, documents of 1,000
    tokens, 3.5 instead of 6.2 ms (bf16, H100, 2026-11-27).
    """
    has = capability or capability_of(device)
    obstacles = _obstacles(has, precision, head_size, compiled=compiled, dropout=dropout, window=window, softcap=softcap)
    usable = [backend for backend, obstacle in obstacles.items() if obstacle is None]
    fastest = "flex" if compiled and has.cuda == _HOPPER and head_size <= _WIDEST_FLEX and "flex" in usable else usable[0]
    if wanted == "auto":
        return fastest
    if (obstacle := obstacles[wanted]) is not None:
        raise ConfigError(f"train.attention = {wanted} {obstacle}; use attention = auto, which is {fastest} here")
    return wanted


def make_layout(
    segments_BL: Tensor,
    positions_BL: Tensor,
    backend: Backend = "sdpa",
    bounds: Tensor | None = None,
    *,
    keys_B: Tensor | None = None,
    dropout: float = 0.0,
    window: int = 0,
) -> Layout:
    """Return the layout of a micro-batch, which every layer without a window uses; the others use `within_window` of it.

    `segments_BL` has the number of the document within its row, -1 on padding. `bounds`, for `varlen`, has the int32 first position
    of every piece of a document, then T once or more, which adds empty pieces. Computing it here would make the CPU wait. Only
    `flex` needs `dropout` and `window` here, the settings of the model.
    """
    if backend == "varlen":
        if bounds is None:
            raise ValueError("the varlen backend got no bounds of documents; make the micro-batch with with_bounds = True")
        return Layout(positions_BL, bounds_M=bounds, max_length=segments_BL.shape[1], varlen=_varlen_attention(), keys_B=keys_B)
    if backend == "flex":
        copies = 2 if keys_B is not None and dropout > 0 else 1
        window_blocks = _block_mask(segments_BL, copies, window) if window else None
        return Layout(positions_BL, block_mask=_block_mask(segments_BL, copies), keys_B=keys_B, window_blocks=window_blocks)
    if backend == "documents":
        return Layout(positions_BL, lengths=_lengths(segments_BL), keys_B=keys_B)
    return Layout(positions_BL, mask_B1LL=document_mask(segments_BL), keys_B=keys_B)


def cached_layout(positions_BT: Tensor, num_used: int) -> Layout:
    """Return the layout of T new tokens of each row. Each sees the slots of a cache up to its own position."""
    slots_S = torch.arange(num_used, device=positions_BT.device)
    return Layout(positions_BT, mask_B1LL=(slots_S <= positions_BT[:, :, None])[:, None], slots_BT=positions_BT)


def within_window(layout: Layout, window: int) -> Layout:
    """Return the layout of the layers in which a token sees the last `window` tokens of its document, itself included."""
    if layout.mask_B1LL is not None:
        slots_S = torch.arange(layout.mask_B1LL.shape[-1], device=layout.mask_B1LL.device)
        slots_BT = slots_S[None] if layout.slots_BT is None else layout.slots_BT
        near_BTS = slots_BT[:, :, None] - slots_S < window
        return layout._replace(mask_B1LL=layout.mask_B1LL & near_BTS[:, None])
    if layout.block_mask is not None:
        assert layout.window_blocks is not None, "the layout was made without the window of the model"
        return layout._replace(block_mask=layout.window_blocks)
    return layout._replace(window=window)


def document_mask(segments_BL: Tensor) -> Tensor:
    """A token (third axis) sees another (fourth) of its document if it is not later. Padding sees padding: no empty softmax."""
    length = segments_BL.shape[1]
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segments_BL.device).tril()
    return (same_BLL & causal_LL)[:, None]


def attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, layout: Layout, *, dropout: float = 0.0, softcap: float = 0.0) -> Tensor:
    """Return `softmax(q k^T / sqrt(H)) v` over each token and the tokens before it that it sees; shape (B, N, L, H).

    Scores have the soft cap of `formula.soft_cap`.

    In training a share `dropout` of the probabilities is set to zero, and the others are divided by `1 - dropout`. `dropout` must
    be `model.attention_dropout` or 0.
    """
    q_BNLH, k_BKLH = q_BNLH.to(v_BKLH.dtype), k_BKLH.to(v_BKLH.dtype)
    if softcap or (dropout and layout.keys_B is not None):
        return _attend_changed(q_BNLH, k_BKLH, v_BKLH, layout, dropout, softcap)
    if layout.varlen is not None:
        assert layout.bounds_M is not None
        q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (q_BNLH, k_BKLH, v_BKLH))
        y_TNH = layout.varlen(q_TNH, k_TKH, v_TKH, layout.bounds_M, layout.max_length, layout.window)
        return y_TNH.view(q_BNLH.transpose(1, 2).shape).transpose(1, 2)
    if layout.block_mask is not None:
        return _flex(q_BNLH, k_BKLH, v_BKLH, layout.block_mask)
    if layout.lengths:
        return _attend_documents(q_BNLH, k_BKLH, v_BKLH, layout.lengths, layout.window)
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    if grouped and q_BNLH.is_cuda:
        # On CUDA the kernel for masks needs as many key heads as query heads. Otherwise PyTorch uses the unfused formula.
        group = q_BNLH.shape[1] // k_BKLH.shape[1]
        k_BKLH, v_BKLH, grouped = k_BKLH.repeat_interleave(group, dim=1), v_BKLH.repeat_interleave(group, dim=1), False
    return functional.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, attn_mask=layout.mask_B1LL, enable_gqa=grouped)


def attention_flops(config: ModelConfig, attended_length: int) -> int:
    """Return the operations of `attend` for one token, forward and backward (Chowdhery et al., 2022, PaLM, appendix B)."""
    return 12 * config.heads * config.head_size * attended_length


def attention_bytes(config: ModelConfig, row_length: int, *, mixed: bool, backend: Backend) -> ActivationBytes:
    """Return what `attend` keeps for one token: queries, keys, values and output, and one fp32 statistic of each head.

    `sdpa` also keeps the token's row of the mask as numbers, as `documents` does with a window, and keys and values repeated for
    grouped queries. With dropout `flex` keeps keys and values twice. The others keep all probabilities, before and after dropout,
    and the mask, and with a soft cap the scores; `documents` has fewer of them if documents are shorter than rows.
    """
    size, statistics = computed_bytes(mixed=mixed), FP32_BYTES * config.heads
    width_q, width_kv = config.heads * config.head_size, config.num_kv_heads * config.head_size
    saved = 2 * size * (width_q + width_kv) + statistics
    if backend == "sdpa" or (backend == "documents" and config.window):
        saved += size * row_length
    if backend == "sdpa" and width_kv < width_q:
        saved += 2 * size * width_q
    selective, reused, temporary = size * width_q + statistics, size * (width_q + width_kv), 0
    if config.attention_dropout and backend == "flex":
        saved += 2 * size * width_kv
    elif config.attention_dropout:
        pairs = config.heads * row_length
        saved, selective, reused = saved + (FP32_BYTES + 1 + size) * pairs, selective + size * pairs, reused + size * pairs
        temporary = HASH_BYTES * pairs * 2 // 3  # measured: the last layer's mask is computed before the tensors of its MLP exist
    elif config.attention_softcap and backend != "flex":
        pairs = config.heads * row_length
        saved, selective, reused = saved + (FP32_BYTES + 2 * size) * pairs, selective + size * pairs, reused + size * pairs
    return ActivationBytes(saved, selective, reused, gradients=temporary)


def layout_bytes(config: ModelConfig, row_length: int, backend: Backend) -> int:
    """Return the bytes of a `Layout` for one token, which all layers share, without its positions: the masks of `sdpa` as bools."""
    return row_length * (2 if config.window else 1) if backend == "sdpa" else 0


def attention_operators() -> list[Any]:
    """Return the operators that the backends call. Selective activation checkpointing keeps their outputs."""
    aten = torch.ops.aten
    operators = [
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    ]
    return [*operators, torch.ops.torch_attn._varlen_attn.default] if _VARLEN_MODULE in sys.modules else operators


def _obstacles(
    has: Capability, precision: str, head_size: int, *, compiled: bool, dropout: float, window: int, softcap: float
) -> dict[Backend, str | None]:
    varlen = flex = documents = None
    if has.cuda is None:
        varlen = "needs a CUDA GPU, and the device of this run is the CPU"
        flex = "cannot train on a CPU, because PyTorch has no backward pass for it there"
        if compiled:
            documents = "cannot be compiled once for all micro-batches, and train.compile is on"
        return {"varlen": varlen, "flex": flex, "documents": documents, "sdpa": None}
    found = f"and this one has {has.cuda[0]}.{has.cuda[1]}"
    if not has.has_varlen:
        varlen = f"needs PyTorch 2.10 or newer, and PyTorch {torch.__version__} is installed"
    elif has.cuda < (8, 0):
        varlen = f"needs a GPU of compute capability 8.0 or newer, {found}"
    elif precision not in _HALF_PRECISIONS:
        varlen = f"computes in 16 bits only, and train.precision is {precision}; use precision = bf16"
    elif head_size % _FLASH_HEAD_MULTIPLE or head_size > _MAX_FLASH_HEAD:
        varlen = (
            f"takes heads whose width is a multiple of {_FLASH_HEAD_MULTIPLE} up to {_MAX_FLASH_HEAD}, and the width is {head_size}"
        )
    elif dropout:
        varlen = "has no dropout, and model.attention_dropout is above 0"
    elif softcap:
        varlen = "has no soft cap, and model.attention_softcap is above 0"
    elif window and not has.has_varlen_windows:
        varlen = f"has no window in PyTorch {torch.__version__}, and model.window is {window}"
    if not has.has_triton:
        flex = "needs Triton, which is not installed (pip install triton)"
    elif has.cuda < (7, 5):
        flex = f"needs a GPU of compute capability 7.5 or newer, {found}"
    elif head_size < _MIN_FLEX_HEAD:
        flex = f"takes heads of width {_MIN_FLEX_HEAD} or more, and the width is {head_size}"
    documents = "is for CPUs only: on a GPU it would start one kernel for each document"
    return {"varlen": varlen, "flex": flex, "documents": documents, "sdpa": None}


def _lengths(segments_BL: Tensor) -> tuple[int, ...]:
    is_first_BL = torch.ones_like(segments_BL, dtype=torch.bool)
    torch.ne(segments_BL[:, 1:], segments_BL[:, :-1], out=is_first_BL[:, 1:])
    firsts_P = is_first_BL.flatten().nonzero().flatten()
    end = firsts_P.new_tensor([segments_BL.numel()])
    return tuple(torch.diff(firsts_P, append=end).tolist())


def _block_mask(segments_BL: Tensor, copies: int, window: int = 0) -> BlockMask:
    num_rows, length = segments_BL.shape

    def may_look(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        key = key % length if copies > 1 else key
        sees = (segments_BL[row, query] == segments_BL[row, key]) & (query >= key)
        return sees & (query - key < window) if window else sees

    if copies == 1 and length % _FLEX_BLOCK == 0:
        names = [f"{kind}{side}_{what}" for kind in ("", "full_") for side in ("kv", "q") for what in ("num_blocks", "indices")]
        tensors = (_compiled(_blocks) if segments_BL.is_cuda else _blocks)(segments_BL, window)
        blocks = dict(zip(names, tensors, strict=True))
        return BlockMask((length, length), BLOCK_SIZE=(_FLEX_BLOCK, _FLEX_BLOCK), mask_mod=may_look, **blocks)
    create = _compiled(create_block_mask) if segments_BL.is_cuda else create_block_mask
    return cast(BlockMask, create(may_look, num_rows, None, length, copies * length, device=segments_BL.device))


def _blocks(segments_BL: Tensor, window: int) -> list[Tensor]:
    """Return numbers and indices of the blocks that each block of queries sees in part, and of those that see each block of keys;
    then those of the blocks that are seen as a whole.

    Documents are contiguous, so the first and the last token of each block tell this. Asking the mask for each pair of tokens, as
    `create_block_mask` does, took 1.1 ms for 32 rows of 1,024 tokens (H100, 2026-11-27).
    """
    firsts_BQ, lasts_BQ = segments_BL[:, ::_FLEX_BLOCK], segments_BL[:, _FLEX_BLOCK - 1 :: _FLEX_BLOCK]
    places_Q = torch.arange(firsts_BQ.shape[1], device=segments_BL.device)
    is_earlier_QK, is_own_QK = places_Q[:, None] > places_Q, places_Q[:, None] == places_Q
    is_whole_BQK = is_earlier_QK & (lasts_BQ[:, :, None] == firsts_BQ[:, None, :])
    is_seen_BQK = is_earlier_QK & (firsts_BQ[:, :, None] == lasts_BQ[:, None, :])
    if window:
        # The distance of the first tokens of two blocks. That of their other tokens is up to a block more or less.
        starts_QK = (places_Q[:, None] - places_Q) * _FLEX_BLOCK
        is_whole_BQK = is_whole_BQK & (starts_QK + _FLEX_BLOCK - 1 < window)
        is_seen_BQK = is_seen_BQK & (starts_QK - _FLEX_BLOCK + 1 < window)
    is_part_BQK = is_own_QK | (is_seen_BQK & ~is_whole_BQK)
    found = []
    for is_chosen_BQK in (is_part_BQK, is_whole_BQK):
        for rows in (is_chosen_BQK[:, None], is_chosen_BQK[:, None].transpose(2, 3)):
            order = torch.argsort(rows.int(), dim=-1, descending=True, stable=True)
            found += [rows.sum(-1, dtype=torch.int32), order.int().contiguous()]  # the kernel takes the last stride for 1
    return found


def _flex(q_BNLH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: BlockMask, change_score: ScoreChange | None = None) -> Tensor:
    compiles_alone = q_BNLH.is_cuda and not torch.compiler.is_compiling()  # a compiled model includes flex
    flex = _compiled(flex_attention) if compiles_alone else cast("Callable[..., Any]", flex_attention)
    grouped = q_BNLH.shape[1] != k_BKSH.shape[1]
    # Rows of fewer than 128 tokens would get the kernel for single tokens, which has no form for some grouped heads (torch 2.11).
    options: dict[str, Any] | None = {"FORCE_USE_FLEX_ATTENTION": True} if q_BNLH.is_cuda else None
    fits = q_BNLH.shape[-1] <= _WIDEST_TUNED and q_BNLH.dtype in (torch.float16, torch.bfloat16) and change_score is None
    if q_BNLH.is_cuda and fits and torch.cuda.get_device_capability(q_BNLH.device) == _HOPPER:
        options = {"FORCE_USE_FLEX_ATTENTION": True} | _FLEX_ON_HOPPER
    attended = flex(q_BNLH, k_BKSH, v_BKSH, score_mod=change_score, block_mask=mask, enable_gqa=grouped, kernel_options=options)
    return cast(Tensor, attended)


def _attend_changed(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, layout: Layout, rate: float, cap: float) -> Tensor:
    assert layout.varlen is None, "choose_backend refuses varlen with dropout and with a soft cap"
    keys_B = layout.keys_B if rate else None
    if layout.block_mask is not None:

        def capped(score: Tensor, *_place: Tensor) -> Tensor:
            return soft_cap(score, cap)

        if keys_B is None:
            return _flex(q_BNLH, k_BKLH, v_BKLH, layout.block_mask, capped)
        k_BKSH, v_BKSH, change_score = doubled_keys(q_BNLH, k_BKLH, v_BKLH, keys_B, rate, cap)
        return _flex(q_BNLH, k_BKSH, v_BKSH, layout.block_mask, change_score)
    if layout.lengths:
        return documents_by_formula(q_BNLH, k_BKLH, v_BKLH, layout.lengths, keys_B, rate, layout.window, cap)
    assert layout.mask_B1LL is not None
    places_1L = torch.arange(q_BNLH.shape[2], device=q_BNLH.device)[None]
    return attention_by_formula(q_BNLH, k_BKLH, v_BKLH, layout.mask_B1LL, keys_B, places_1L, rate, cap)


@cache
def _varlen_attention() -> VarlenAttention:
    kernel = importlib.import_module(_VARLEN_MODULE).varlen_attn
    return causal_varlen(kernel, inspect.signature(kernel).parameters)


def causal_varlen(kernel: Callable[..., Any], parameters: Collection[str]) -> VarlenAttention:
    """Return `varlen_attn` of any PyTorch from 2.10 on with the signature that this module uses.

    2.10 has `is_causal` instead of `window_size`. Before 2.12 there is no `enable_gqa`, so keys and values are repeated.
    """
    takes_window, takes_groups = "window_size" in parameters, "enable_gqa" in parameters

    def attention(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor, max_length: int, window: int) -> Tensor:
        # The kernel counts the tokens before a token. -1 stands for all.
        options: dict[str, Any] = {"window_size": (window - 1, 0)} if takes_window else {"is_causal": True}
        if (group := q_TNH.shape[1] // k_TKH.shape[1]) > 1:
            if takes_groups:
                options["enable_gqa"] = True
            else:
                k_TKH, v_TKH = k_TKH.repeat_interleave(group, dim=1), v_TKH.repeat_interleave(group, dim=1)
        return cast(Tensor, kernel(q_TNH, k_TKH, v_TKH, bounds_M, bounds_M, max_length, max_length, **options))

    return attention


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Without compilation flex stores all scores in memory, and `create_block_mask` the whole mask and its indices as integers.
    return torch.compile(function, dynamic=False)


def _attend_documents(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, lengths: tuple[int, ...], window: int) -> Tensor:
    if set(lengths) == {q_BNLH.shape[2]}:
        return _causal(q_BNLH, k_BKLH, v_BKLH, window)
    if len(set(lengths)) == 1:
        q, k, v = (
            x.transpose(1, 2).reshape(-1, lengths[0], x.shape[1], x.shape[3]).transpose(1, 2) for x in (q_BNLH, k_BKLH, v_BKLH)
        )
        y_BLNH = _causal(q, k, v, window).transpose(1, 2).reshape(q_BNLH.transpose(1, 2).shape)
        return y_BLNH.transpose(1, 2)
    # One split and one concatenation, because the gradient of a slice for each document is as large as the micro-batch.
    pieces = (torch.split(x.transpose(1, 2).flatten(0, 1), list(lengths)) for x in (q_BNLH, k_BKLH, v_BKLH))
    documents = ([x.transpose(0, 1)[None] for x in document] for document in zip(*pieces, strict=True))
    parts = [_causal(q, k, v, window)[0].transpose(0, 1) for q, k, v in documents]
    return torch.cat(parts).view(q_BNLH.transpose(1, 2).shape).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    mask = causal_mask(q.shape[2], window) if 0 < window < q.shape[2] else None
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
