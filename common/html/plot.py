"""The area of a picture in which values are drawn, and the rendering of picture templates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from common.html.page import template_environment

__all__ = ["Plot", "draw_template"]

Number = TypeVar("Number", float, NDArray[np.float64])

_PICTURES = template_environment(Path(__file__).parent, tenths="{:.1f}".format)


@dataclass(frozen=True)
class Plot:
    """The size of a picture and the margins around its plot, in units of the picture."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    @property
    def end(self) -> int:
        return self.width - self.right

    @property
    def base(self) -> int:
        return self.height - self.bottom

    def x(self, part: Number) -> Number:
        return self.left + (self.end - self.left) * part

    def y(self, part: Number) -> Number:
        return self.base - (self.base - self.top) * part


def draw_template(name: str, plot: Plot, **values: object) -> Markup:
    return Markup(_PICTURES.get_template(name).render(plot=plot, **values))
