"""Replaces the model by the decoder with squared ReLU instead of SwiGLU (So et al., 2021: Primer).

    trainer train --extension examples/model.py ...

A model can be any module whose `forward(tokens_BL, layout)` returns the logits of the next token. Each position may depend only
on itself and earlier positions of the same document; `trainer.api.attend` ensures this.

B rows of a micro-batch   L tokens of a row   D width   F hidden width
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.api import Decoder, ModelConfig


class SquaredReluMlp(nn.Module):
    """`down(relu(up(x))^2)`, with the same number of weights as SwiGLU for the same settings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_size * 3 // 2
        self.up_proj = nn.Linear(config.width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """Return the contribution of the layer to the residual stream, (B, L, D)."""
        result: Tensor = self.down_proj(self.up_proj(x_BLD).relu().square())
        return result


def build_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """Return a decoder with new weights. The trainer has seeded torch's generator."""
    model = Decoder(config, vocab_size)
    for layer in model.model.layers:
        layer.mlp = SquaredReluMlp(config)
    for weight in model.parameters():
        if weight.ndim >= 2:
            nn.init.normal_(weight, std=config.init_std)
    return model
