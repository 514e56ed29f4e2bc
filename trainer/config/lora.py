"""Settings of low-rank adapters."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from common.settings.conditions import OnlyIf
from common.settings.markers import FixesShapes, Identity
from common.settings.model import Section

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters (LoRA), which are trained in place of the weights."""

    rank: Annotated[Identity[int | None], FixesShapes()] = Field(
        None, ge=1, le=4096, description="Rank of the adapters; none: no adapters, all weights are trained."
    )
    alpha: Annotated[Identity[float | None], OnlyIf("lora.rank")] = Field(
        None, gt=0, le=65536, description="Numerator of the adapters' factor alpha / rank; none: twice the rank, a factor of 2."
    )
    targets: Annotated[Identity[tuple[Projection, ...]], OnlyIf("lora.rank"), FixesShapes()] = Field(
        PROJECTIONS, min_length=1, description="Matrices of each layer that have an adapter."
    )
    dropout: Annotated[Identity[float], OnlyIf("lora.rank")] = Field(
        0.0, ge=0, lt=1, description="Share of the adapters' inputs that training sets to zero; 0: no dropout."
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets = {' '.join(self.targets)} names a matrix twice; name each once")
        return self

    @property
    def factor(self) -> float:
        """The number by which the product of the adapter's matrices is multiplied; 0 without adapters."""
        return 0.0 if self.rank is None else (2.0 if self.alpha is None else self.alpha / self.rank)
