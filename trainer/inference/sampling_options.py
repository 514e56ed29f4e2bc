"""The settings of sampling and their bounds. This module does not import torch, so that `generate --help` is fast."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.settings.markers import AlsoCalled
from common.settings.model import Options, Place


class SamplingOptions(Options):
    """Options of a command that writes text."""

    max_tokens: Annotated[int, AlsoCalled("max_new_tokens num_tokens tokens length max_length")] = Field(
        128, ge=1, description="Longest continuation, in tokens."
    )
    temperature: Annotated[float, AlsoCalled("temp")] = Field(
        0.8, ge=0, description="Randomness of the choice. 0 always takes the likeliest token."
    )
    top_k: int | None = Field(None, ge=1, description="Choose among the k likeliest tokens. Without it, among all.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Choose among the fewest likeliest tokens whose probabilities add up to this."
    )
    min_p: float = Field(
        0.0, ge=0, le=1, description="Choose among tokens with at least this share of the likeliest token's probability."
    )
    repetition_penalty: float = Field(
        1.0, gt=0, description="Values above 1 make tokens of the prompt and of the continuation less likely."
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of the random choices. The same seed gives the same text.")
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Place(metavar="TEXT")] = Field(
        (), description="Texts that end a continuation. The continuation does not contain them."
    )
