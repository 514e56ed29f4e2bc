"""In place of the model: the decoder with squared ReLU instead of SwiGLU (So et al., 2021: Primer).

    python -m trainer train --extension examples/model.py ...

Any module will do whose `forward(tokens_BL, layout)` returns the logits of the next token and looks, for each position, only at
earlier ones of the same document; `trainer.api.attend` sees to that.

B rows of a micro-batch   L tokens of a row   D width   F hidden width
"""

from __future__ import annotations

from torch import Tensor, nn

from trainer.api import Decoder, ModelConfig


class SquaredReluMlp(nn.Module):
    """`down(relu(up(x))^2)`, with as many weights as SwiGLU of the same settings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.mlp_size * 3 // 2
        self.up_proj = nn.Linear(config.width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """The layer's contribution to the residual stream, (B, L, D)."""
        result: Tensor = self.down_proj(self.up_proj(x_BLD).relu().square())
        return result


def build_model(config: ModelConfig, vocab_size: int) -> nn.Module:
    """A decoder with fresh weights; torch's generator has been seeded for it."""
    model = Decoder(config, vocab_size)
    for layer in model.model.layers:
        layer.mlp = SquaredReluMlp(config)
    for weight in model.parameters():
        if weight.ndim >= 2:
            nn.init.normal_(weight, std=config.init_std)
    return model
