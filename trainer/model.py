"""The decoder: RMSNorm, rotary embeddings, grouped-query attention with QK-norm, SwiGLU.

Parameter names and meanings are those of Qwen3 in Hugging Face transformers, so that an export is a copy.

    B rows   L tokens of a row   D width of the residual stream   N query heads   K key and value heads   H width of a head
    F hidden width of SwiGLU     V vocabulary, padded
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.attention import attend, document_mask
from trainer.config import ModelConfig

__all__ = ["Decoder", "build_model", "load_weights", "parameters_by_name"]


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and type as `x`."""
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention; queries and keys are normalised, then rotated by their position in the document."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        width_q, width_kv = config.heads * config.head_size, config.num_kv_heads * config.head_size
        self.q_proj = nn.Linear(config.width, width_q, bias=False)
        self.k_proj = nn.Linear(config.width, width_kv, bias=False)
        self.v_proj = nn.Linear(config.width, width_kv, bias=False)
        self.o_proj = nn.Linear(width_q, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps)
        self.k_norm = RMSNorm(config.head_size, config.norm_eps)

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor], mask_B1LL: Tensor) -> Tensor:
        """The attention's contribution to the residual stream, (B, L, D)."""
        q_BNLH = rotate(self._heads(self.q_proj(x_BLD), self.q_norm), rotation)
        k_BKLH = rotate(self._heads(self.k_proj(x_BLD), self.k_norm), rotation)
        v_BKLH = self._heads(self.v_proj(x_BLD))
        y_BNLH = attend(q_BNLH, k_BKLH, v_BKLH, mask_B1LL)
        return cast(Tensor, self.o_proj(y_BNLH.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        heads_BLNH = x.view(*x.shape[:-1], -1, self.head_dim)
        normed: Tensor = norm(heads_BLNH) if norm else heads_BLNH
        return normed.transpose(1, 2)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The layer's contribution to the residual stream, (B, L, D)."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD)))


class DecoderLayer(nn.Module):
    """Attention, then SwiGLU, each on the normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor], mask_B1LL: Tensor) -> Tensor:
        """The residual stream after this layer, (B, L, D)."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), rotation, mask_B1LL)
        return x_BLD + cast(Tensor, self.mlp(self.post_attention_layernorm(x_BLD)))


class Backbone(nn.Module):
    """Everything between the tokens and the last normalised state."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)


class Decoder(nn.Module):
    """A causal language model over packed rows."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        padded = config.padded_vocab(vocab_size)
        self.model = Backbone(config, padded)
        self.lm_head = nn.Linear(config.width, padded, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, positions_BL: Tensor) -> Tensor:
        """Logits of the next token, (B, L, V), in the type of the computation.

        Args:
            tokens_BL: int64 ids.
            segments_BL: the document that each token belongs to, -1 on padding; attention stays inside a document.
            positions_BL: int64 place of each token in its document.
        """
        mask_B1LL = document_mask(segments_BL)
        rotation = rotary_table(positions_BL, self.config.head_size, self.config.rope_theta)
        x_BLD = self.model.embed_tokens(tokens_BL)
        for layer in self.model.layers:
            if self.config.activation_checkpointing == "full" and self.training:
                x_BLD = checkpoint(layer, x_BLD, rotation, mask_B1LL, use_reentrant=False)
            else:
                x_BLD = layer(x_BLD, rotation, mask_B1LL)
        return cast(Tensor, self.lm_head(self.model.norm(x_BLD)))


def rotary_table(positions_BL: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary embedding (Su et al., 2021), each (B, 1, L, H/2), fp32: angle `p * theta^(-2i/H)`."""
    exponents = torch.arange(0, head_dim, 2, device=positions_BL.device, dtype=torch.float32) / head_dim
    angles = positions_BL[:, None, :, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x_BNLH: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turns the pairs (x_i, x_{i+H/2}) by their angles; same shape and type as the input."""
    cos, sin = rotation
    first, second = x_BNLH.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BNLH.dtype)


def build_model(config: ModelConfig, vocab_size: int, seed: int) -> Decoder:
    """A decoder with fresh weights, the same for the same seed wherever it is built (CPU, fp32).

    Matrices are normal with `init_std`; those that write to the residual stream are scaled by 1/sqrt(2 layers), so that its
    variance does not grow with depth (Radford et al., 2019). Norm weights are one.
    """
    model = Decoder(config, vocab_size)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters_by_name(model).items():
        if parameter.ndim < 2:
            continue
        writes_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = config.init_std / math.sqrt(2 * config.layers) if writes_residual else config.init_std
        with torch.no_grad():
            parameter.normal_(0.0, std, generator=generator)
    return model


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights by name into a model, on whatever device it is.

    Raises:
        KeyError: a parameter of the model has no weight.
    """
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            parameter.copy_(weights[name])


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters in the order of their names; one that is shared appears once, under its first name."""
    return dict(sorted(model.named_parameters()))
