"""A decoder written from scratch, with rotary positions and with attention and feed-forward layer side by side.

    trainer train --extension examples/decoder.py ...

Both parts of a layer read the same normalised input: `x + attention(norm(x)) + mlp(norm(x))` (Wang and Komatsuzaki, 2021: GPT-J).
The trainer needs only `forward(tokens_BL, layout)` and, for `parallel = fsdp` and for Muon, the list `layers`. Positions begin at 0
in each document (`layout.positions_BL`). `trainer.api.attend` looks at no other document and at no later token.

B rows of a micro-batch   L tokens of a row   D width   N heads   H width of a head   V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.api import Layout, ModelConfig, attend


class ParallelLayer(nn.Module):
    """One layer: causal self-attention and a feed-forward layer, side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x_BLD: Tensor, cos_BLH: Tensor, sin_BLH: Tensor, layout: Layout) -> Tensor:
        """Return the residual stream after this layer, (B, L, D)."""
        h_BLD = self.norm(x_BLD)
        q_BNLH, k_BNLH, v_BNLH = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(h_BLD).chunk(3, dim=-1))
        y_BNLH = attend(rotated(q_BNLH, cos_BLH, sin_BLH), rotated(k_BNLH, cos_BLH, sin_BLH), v_BNLH, layout)
        attention_BLD: Tensor = self.out(y_BNLH.transpose(1, 2).flatten(2))
        mlp_BLD: Tensor = self.down(functional.gelu(self.up(h_BLD)))
        return x_BLD + attention_BLD + mlp_BLD


class ParallelDecoder(nn.Module):
    """Embedding, layers, and logits from the weights of the embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.head_size = config.width // config.heads
        self.theta = config.rope_theta
        self.embedding = nn.Embedding(vocab_size, config.width)
        self.layers = nn.ModuleList(ParallelLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=config.init_std)

    def forward(self, tokens_BL: Tensor, layout: Layout) -> Tensor:
        """Return the logits of the next token, (B, L, V)."""
        cos_BLH, sin_BLH = angles(layout.positions_BL, self.head_size, self.theta)
        x_BLD = self.embedding(tokens_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, cos_BLH, sin_BLH, layout)
        return functional.linear(self.norm(x_BLD), self.embedding.weight)


def angles(positions_BL: Tensor, head_size: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of `position * theta^(-2i / H)` for the pair `i` of a head, each (B, L, H) (Su et al., 2021: RoPE)."""
    exponents = torch.arange(0, head_size, 2, device=positions_BL.device, dtype=torch.float32) / head_size
    angle_BLP = positions_BL[..., None].float() * theta**-exponents
    angle_BLH = torch.cat((angle_BLP, angle_BLP), dim=-1)
    return angle_BLH.cos(), angle_BLH.sin()


def rotated(x_BNLH: Tensor, cos_BLH: Tensor, sin_BLH: Tensor) -> Tensor:
    """Return queries or keys rotated by the angles of their positions; the pairs are the two halves of a head."""
    first, second = x_BNLH.chunk(2, dim=-1)
    return x_BNLH * cos_BLH[:, None] + torch.cat((-second, first), dim=-1) * sin_BLH[:, None]


def build_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Return a decoder with new weights. The trainer has seeded torch's generator."""
    return ParallelDecoder(config, vocab_size)
