"""Draws `docs/schedules.svg` from the code itself: `python -m docs.draw_schedules`, in the root of the repository."""

from __future__ import annotations

from pathlib import Path

from trainer.config import ScheduleConfig
from trainer.optim.schedule import learning_rate_factor

PICTURE = Path(__file__).with_name("schedules.svg")

WARMUP, DECAY_STEPS, SHOWN_STEPS, FLOOR = 100, 1000, 1150, 0.1
SETTINGS = {"warmup_steps": WARMUP, "min_lr_ratio": FLOOR, "decay_share": 0.3, "power": 2.0, "milestones": (400, 700), "gamma": 0.4}
# Each panel: the kind, its own settings in words, and the steps that are named on its axis.
PANELS = (
    ("cosine", "", (WARMUP, DECAY_STEPS)),
    ("linear", "", (WARMUP, DECAY_STEPS)),
    ("wsd", "decay_share 0.3, dashed: sqrt", (WARMUP, 700, DECAY_STEPS)),
    ("constant", "", (WARMUP,)),
    ("polynomial", "power 2", (WARMUP, DECAY_STEPS)),
    ("exponential", "", (WARMUP, DECAY_STEPS)),
    ("step", "gamma 0.4", (WARMUP, 400, 700)),
)
COLUMNS, PANEL_WIDTH, PANEL_HEIGHT = 4, 230, 190
PLOT_LEFT, PLOT_TOP, PLOT_WIDTH, PLOT_HEIGHT = 40, 40, 175, 110
STYLE = """
  text { font: 12px sans-serif; fill: #24292f; }
  .name { font-weight: bold; font-size: 14px; }
  .axis { stroke: #57606a; fill: none; }
  .guide { stroke: #b4bcc6; stroke-dasharray: 2 3; }
  .rate { stroke: #0550ae; stroke-width: 2.2; fill: none; stroke-linejoin: round; }
"""


def draw() -> str:
    """All schedules as one SVG document, a panel for each, on a white ground that also stands on a dark page."""
    width, height = COLUMNS * PANEL_WIDTH + 10, 2 * PANEL_HEIGHT + 5
    panels = "\n".join(_panel(number, *panel) for number, panel in enumerate(PANELS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
        "<title>Learning rate over the steps, for each schedule.kind</title>\n"
        f"<style>{STYLE}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
        f"{panels}\n{_legend()}\n</svg>\n"
    )


def _panel(number: int, kind: str, detail: str, named_steps: tuple[int, ...]) -> str:
    lines = [
        f'<text x="{PLOT_LEFT}" y="24"><tspan class="name">{kind}</tspan> {detail}</text>',
        *(f'<line class="guide" x1="{_x(step)}" y1="{_y(1)}" x2="{_x(step)}" y2="{_y(0)}"/>' for step in named_steps),
        *(f'<line class="guide" x1="{_x(0)}" y1="{_y(share)}" x2="{_x(SHOWN_STEPS)}" y2="{_y(share)}"/>' for share in (1, FLOOR)),
        f'<path class="axis" d="M{_x(0)},{_y(1.08)} V{_y(0)} H{_x(SHOWN_STEPS)}"/>',
        *(f'<text x="{_x(step)}" y="{PLOT_TOP + PLOT_HEIGHT + 16}" text-anchor="middle">{step}</text>' for step in named_steps),
        *(f'<text x="{PLOT_LEFT - 6}" y="{_y(share) + 4:.1f}" text-anchor="end">{share}</text>' for share in (1, FLOOR)),
        f'<polyline class="rate" points="{_curve(kind)}"/>',
    ]
    if kind == "wsd":
        lines.append(f'<polyline class="rate" stroke-dasharray="5 4" points="{_curve(kind, cooldown_shape="sqrt")}"/>')
    return f'<g transform="{_place(number)}">\n' + "\n".join(lines) + "\n</g>"


def _legend() -> str:
    lines = (
        "Up: share of optim.lr",
        "Right: optimizer step",
        f"warmup_steps {WARMUP}",
        f"decay_steps {DECAY_STEPS}",
        f"floor {FLOOR}",
        "milestones 400, 700",
    )
    texts = "\n".join(f'<text x="{PLOT_LEFT}" y="{PLOT_TOP + 12 + 19 * row}">{line}</text>' for row, line in enumerate(lines))
    return f'<g transform="{_place(len(PANELS))}">\n{texts}\n</g>'


def _curve(kind: str, **changes: str) -> str:
    """Points of a panel's line; the step before a milestone is among them, so that a drop stands upright."""
    config = ScheduleConfig.model_validate({"kind": kind, **SETTINGS, **changes})
    steps = sorted({*range(0, SHOWN_STEPS + 1, 10), *(milestone - 1 for milestone in config.milestones)})
    return " ".join(f"{_x(step)},{_y(learning_rate_factor(config, DECAY_STEPS, step))}" for step in steps)


def _place(number: int) -> str:
    row, column = divmod(number, COLUMNS)
    return f"translate({column * PANEL_WIDTH},{row * PANEL_HEIGHT})"


def _x(step: int) -> float:
    return round(PLOT_LEFT + PLOT_WIDTH * step / SHOWN_STEPS, 1)


def _y(share: float) -> float:
    return round(PLOT_TOP + PLOT_HEIGHT * (1.08 - share) / 1.08, 1)


if __name__ == "__main__":
    PICTURE.write_text(draw())
