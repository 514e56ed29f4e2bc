"""Settings of the objectives of fine-tuning."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.effects import OnlyIf
from common.settings.model import Section

__all__ = ["PreferenceConfig"]

_PREFERENCE = OnlyIf("objective = preference")


class PreferenceConfig(Section):
    """The loss of preference pairs (DPO)."""

    beta: Annotated[float, _PREFERENCE] = Field(
        0.1, gt=0, le=100, description="Weight of the reference: a higher value keeps the model closer to its initial weights."
    )
    label_smoothing: Annotated[float, _PREFERENCE] = Field(
        0.0, ge=0, lt=0.5, description="Assumed share of pairs in which the two answers are in the wrong order."
    )
