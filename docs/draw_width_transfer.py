"""Draws `docs/width_transfer.svg`, a coordinate check: `python -m docs.draw_width_transfer`, in the root of the repository.

A coordinate check (Yang et al., 2022, Tensor Programs V, appendix D.1) trains models of several widths for a few steps at one
learning rate, and compares how much their outputs change. With width transfer the change is the same at each width.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from trainer.config import ModelConfig, OptimConfig
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.optim.optimizers import build_optimizers

PICTURE = Path(__file__).with_name("width_transfer.svg")
WIDTHS, BASE_WIDTH, NUM_STEPS = (64, 128, 256, 512), 64, 5
Kind = Literal["adamw", "muon"]

_VOCAB, _ROWS, _LENGTH, _HEAD, _RATE = 256, 8, 64, 16, 1e-3
_KINDS: tuple[Kind, ...] = ("adamw", "muon")
_PANEL, _HEIGHT, _LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 400, 270, 60, 45, 310, 170
_LOWEST, _HIGHEST = 0.05, 2.0
_STYLE = """
  text { font: 12px sans-serif; fill: #24292f; }
  .name { font-weight: bold; font-size: 14px; }
  .axis { stroke: #57606a; fill: none; }
  .guide { stroke: #d0d7de; }
  .on { stroke: #0550ae; fill: none; stroke-width: 2.2; }
  .off { stroke: #bc4c00; fill: none; stroke-width: 2.2; stroke-dasharray: 6 4; }
"""


def logit_change(kind: Kind, width: int, base_width: int | None, num_steps: int = NUM_STEPS) -> float:
    """Return the root mean square of the change of all logits after a few steps on one batch, for a model of two layers.

    The batch has 8 rows of 64 tokens, whose frequencies fall with their rank as those of words do.
    """
    config = ModelConfig(layers=2, width=width, heads=width // _HEAD, context=_LENGTH, base_width=base_width)
    model = build_model(config, _VOCAB, seed=1)
    optimizers = build_optimizers(model, OptimConfig(kind=kind, lr=_RATE), config.width_ratio)
    tokens_BL = _tokens()
    layout = make_layout(torch.zeros(_ROWS, _LENGTH, dtype=torch.int32), torch.arange(_LENGTH).repeat(_ROWS, 1))
    logits: list[Tensor] = []
    for _ in range(num_steps + 1):
        model.zero_grad()
        logits_BLV = model(tokens_BL[:, :-1], layout)
        logits.append(logits_BLV.detach())
        functional.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
    return float((logits[-1] - logits[0]).square().mean().sqrt())


def draw(changes: dict[tuple[Kind, int | None], list[float]]) -> str:
    """Return a panel for each optimizer, with the change of the logits at each width, without and with width transfer."""
    panels = "\n".join(_panel(number, kind, changes) for number, kind in enumerate(_KINDS))
    width = len(_KINDS) * _PANEL
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" width="{width}" height="{_HEIGHT}" role="img">\n'
        f"<title>Change of the logits after {NUM_STEPS} steps, by width</title>\n<style>{_STYLE}</style>\n"
        f'<rect width="{width}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>\n{panels}\n</svg>\n'
    )


def _tokens() -> Tensor:
    shares_V = 1 / torch.arange(1, _VOCAB + 1)
    generator = torch.Generator().manual_seed(3)
    return torch.multinomial(shares_V, _ROWS * (_LENGTH + 1), replacement=True, generator=generator).view(_ROWS, _LENGTH + 1)


def _panel(number: int, kind: Kind, changes: dict[tuple[Kind, int | None], list[float]]) -> str:
    marks = (0.1, 0.2, 0.5, 1.0)
    lines = [
        f'<text x="{_LEFT}" y="24"><tspan class="name">{kind}</tspan> RMS change of the logits after {NUM_STEPS} steps</text>',
        *(f'<line class="guide" x1="{_LEFT}" y1="{_y(mark)}" x2="{_LEFT + _PLOT_WIDTH}" y2="{_y(mark)}"/>' for mark in marks),
        *(f'<text x="{_LEFT - 6}" y="{_y(mark) + 4:.1f}" text-anchor="end">{mark}</text>' for mark in marks),
        *(f'<text x="{_x(width)}" y="{_TOP + _PLOT_HEIGHT + 18}" text-anchor="middle">{width}</text>' for width in WIDTHS),
        f'<path class="axis" d="M{_LEFT},{_TOP} V{_TOP + _PLOT_HEIGHT} H{_LEFT + _PLOT_WIDTH}"/>',
    ]
    for base, style, label in ((None, "off", "model.base_width none"), (BASE_WIDTH, "on", f"model.base_width {BASE_WIDTH}")):
        points = " ".join(f"{_x(width)},{_y(change)}" for width, change in zip(WIDTHS, changes[kind, base], strict=True))
        height = _TOP + _PLOT_HEIGHT + (34 if base is None else 49)
        lines += [
            f'<polyline class="{style}" points="{points}"/>',
            f'<line class="{style}" x1="{_LEFT}" y1="{height - 4}" x2="{_LEFT + 30}" y2="{height - 4}"/>',
            f'<text x="{_LEFT + 38}" y="{height}">{label}: {", ".join(f"{change:.3f}" for change in changes[kind, base])}</text>',
        ]
    return f'<g transform="translate({number * _PANEL},0)">\n' + "\n".join(lines) + "\n</g>"


def _x(width: int) -> float:
    return round(_LEFT + _PLOT_WIDTH * (math.log2(width / WIDTHS[0]) + 0.3) / (math.log2(WIDTHS[-1] / WIDTHS[0]) + 0.6), 1)


def _y(change: float) -> float:
    return round(_TOP + _PLOT_HEIGHT * math.log(_HIGHEST / change) / math.log(_HIGHEST / _LOWEST), 1)


if __name__ == "__main__":
    measured = {
        (kind, base): [logit_change(kind, width, base) for width in WIDTHS] for kind in _KINDS for base in (None, BASE_WIDTH)
    }
    PICTURE.write_text(draw(measured))
