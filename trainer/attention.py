"""Causal attention that never looks across the documents of a packed row.

B rows   L tokens of a row   N query heads   K key and value heads   H width of a head
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["attend", "document_mask"]


def document_mask(segments_BL: Tensor) -> Tensor:
    """True where a token (third axis) may look at another (fourth): same document and not later. Shape (B, 1, L, L), bool.

    Padding has segment -1 and looks at earlier padding only, so that no row of the softmax is empty.
    """
    length = segments_BL.shape[1]
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=segments_BL.device).tril()
    return (same_BLL & causal_LL)[:, None]


def attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask_B1LL: Tensor) -> Tensor:
    """Softmax attention, `softmax(q k^T / sqrt(H)) v` where the mask is True; shape (B, N, L, H)."""
    grouped = q_BNLH.shape[1] != k_BKLH.shape[1]
    return functional.scaled_dot_product_attention(q_BNLH, k_BKLH, v_BKLH, attn_mask=mask_B1LL, enable_gqa=grouped)
