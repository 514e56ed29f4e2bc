"""Dropout whose masks are a pure function of the place of a number: seed, step, row of the global batch, layer, position.

PyTorch's dropout draws from a generator, so a mask depends on everything that was drawn before it. Here a hash decides for each
number. The mask is the same on every device, compiled or not, for every kernel of the attention, for every size of the
micro-batches and number of ranks, and when activation checkpointing computes a layer again. Nothing has to be saved for a resume.

The hash starts from the key of a row. Each level of the place mixes its number into the key: `key' = mix(key xor number)`, with
unsigned 32-bit keys in int64 tensors. `mix` is an xor-shift-multiply hash, in which each bit of the input changes each bit of the
output with a probability of about one half.

B rows   L tokens of a row   D width   N heads   K key and value heads   H width of a head
P documents (or whole rows)   Q tokens of a document   S keys, in `doubled_keys` 2 L
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.model.formula import causal_mask, probabilities, soft_cap

ScoreChange = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps a score and its row, head, query and key to the score that `flex_attention` uses instead."""

EMBEDDING = 0  # The number of the embedding, one level below the keys of the rows. The layers have the numbers from 1 on.
HASH_BYTES = 24
"""Bytes for each number of a mask while it is computed: three int64 numbers. Afterwards one byte is kept for the backward pass."""
_ATTENTION, ATTENTION_OUTPUT, MLP_OUTPUT = range(3)  # the places within a layer that drop numbers
ADAPTERS = 3  # the first of the places that drop inputs of adapters, one for each matrix of a layer
_MASK = (1 << 32) - 1


def row_keys(seed: int, step: int, first_row: int, num_rows: int, device: torch.device, draw: int = 0) -> Tensor:
    """Return the keys of rows of a global batch, int64 (B,), without waiting for the device. Another `draw` gives other masks."""
    digest = hashlib.sha256(f"dropout {seed} {step} {draw}".encode()).digest()
    rows_B = torch.arange(first_row, first_row + num_rows, device=device)
    return _mix(rows_B ^ int.from_bytes(digest[:4]))


def below(keys: Tensor, number: Tensor | int) -> Tensor:
    """Return the keys of the places with this number, one level below `keys`. Both have values below 2^32, and broadcast."""
    return _mix(keys ^ number)


def dropout(x_BLD: Tensor, rate: float, keys_B: Tensor | None, site: int) -> Tensor:
    """Return `x` with a share `rate` of its numbers set to zero and the others divided by `1 - rate` (Srivastava et al., 2014).

    Without `keys_B` there is no dropout. Two places with the same number `site` and the same keys have the same mask.
    """
    if keys_B is None or not rate:
        return x_BLD
    _, length, width = x_BLD.shape
    keys_BL = below(below(keys_B, site)[:, None], torch.arange(length, device=x_BLD.device))
    keys_BLD = below(keys_BL[:, :, None], torch.arange(width, device=x_BLD.device))
    return torch.where(_is_kept(keys_BLD, rate), x_BLD / (1 - rate), 0.0)


def attention_by_formula(
    q_PNQH: Tensor,
    k_PKSH: Tensor,
    v_PKSH: Tensor,
    mask: Tensor,
    keys_P: Tensor | None,
    places_PQ: Tensor,
    rate: float,
    cap: float = 0.0,
) -> Tensor:
    """Return attention with dropout of its probabilities and a soft cap of its scores, (P, N, Q, H). It stores all probabilities.

    `mask` has bools that broadcast to (P, N, Q, S): which keys a query sees. `places_PQ` has the place of each token in its row, so
    that all backends drop the same probabilities. Without `keys_P` there is no dropout.
    """
    group = q_PNQH.shape[1] // k_PKSH.shape[1]
    k_PNSH, v_PNSH = (x.repeat_interleave(group, dim=1) for x in (k_PKSH, v_PKSH))
    chances = probabilities(q_PNQH, k_PNSH, mask, cap).to(v_PNSH.dtype)
    if keys_P is not None and rate:
        keys_PNQ = _query_keys(keys_P, places_PQ, q_PNQH.shape[1])
        kept = _is_kept(below(keys_PNQ[..., None], places_PQ[:, None, None]), rate)
        chances = torch.where(kept, chances / (1 - rate), 0.0)
    return chances @ v_PNSH


def documents_by_formula(
    q_BNLH: Tensor,
    k_BKLH: Tensor,
    v_BKLH: Tensor,
    lengths: Sequence[int],
    keys_B: Tensor | None,
    rate: float,
    window: int = 0,
    cap: float = 0.0,
) -> Tensor:
    """Return `attention_by_formula` inside each document, causal, (B, N, L, H), one document at a time."""
    num_rows, num_heads, length, size = q_BNLH.shape
    pieces = (torch.split(x.transpose(1, 2).flatten(0, 1), list(lengths)) for x in (q_BNLH, k_BKLH, v_BKLH))
    parts, first = [], 0
    for document in zip(*pieces, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in document)
        row, place = divmod(first, length)
        places_1Q = torch.arange(place, place + q.shape[2])[None]
        seen_QQ = causal_mask(q.shape[2], window)
        keys_1 = None if keys_B is None else keys_B[row : row + 1]
        parts.append(attention_by_formula(q, k, v, seen_QQ, keys_1, places_1Q, rate, cap)[0].transpose(0, 1))
        first += q.shape[2]
    return torch.cat(parts).view(num_rows, length, num_heads, size).transpose(1, 2)


def doubled_keys(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, keys_B: Tensor, rate: float, cap: float = 0.0
) -> tuple[Tensor, Tensor, ScoreChange]:
    """Return keys, values and a change of scores with which `flex_attention` has dropout. It changes scores, not probabilities.

    Each key appears twice, first with its value and then with a value of zero. A dropped probability moves to the second copy: it
    counts in the sum of the softmax, but adds nothing. This doubles the work of the kernel. The mask must be true for both copies.
    """
    _, num_heads, length, _ = q_BNLH.shape
    keys_BNL = _query_keys(keys_B, torch.arange(length, device=q_BNLH.device)[None], num_heads)

    def move_dropped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        kept = _is_kept(below(keys_BNL[row, head, query], key % length), rate)
        return torch.where(kept == (key < length), soft_cap(score, cap), -torch.inf)

    values_BKSH = torch.cat([v_BKLH / (1 - rate), torch.zeros_like(v_BKLH)], dim=2)
    return torch.cat([k_BKLH, k_BKLH], dim=2), values_BKSH, move_dropped


def _query_keys(keys_P: Tensor, places_PQ: Tensor, num_heads: int) -> Tensor:
    keys_PN = below(below(keys_P, _ATTENTION)[:, None], torch.arange(num_heads, device=keys_P.device))
    return below(keys_PN[:, :, None], places_PQ[:, None])


def _is_kept(keys: Tensor, rate: float) -> Tensor:
    return keys >= round(rate * (1 << 32))


def _mix(x: Tensor) -> Tensor:
    """Return a hash of each number. Factors are below 2^30, so no product of int64 overflows."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D & _MASK
    x = (x ^ (x >> 12)) * 0x297A2D39 & _MASK
    return x ^ (x >> 15)
