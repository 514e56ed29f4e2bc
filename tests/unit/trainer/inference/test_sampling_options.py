"""The bounds of the sampling: one list for the options of `generate` and for every other use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from common.errors import ConfigError
from trainer.commands.generate import GenerateOptions
from trainer.inference.sampling import Sampling


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("max_tokens", (1,), (0,)),
        ("temperature", (0.0,), (-0.1, float("nan"), float("inf"))),
        ("top_k", (1, None), (0,)),
        ("top_p", (1.0, 1e-9), (0.0, 1.1)),
        ("min_p", (0.0, 1.0), (-0.1, 1.1)),
        ("repetition_penalty", (1e-9,), (0.0, float("inf"))),
        ("stop", (("a",),), (("",),)),
        ("seed", (0, (1 << 63) - 1), (-1, 1 << 63)),
    ],
)
def test_values_out_of_bounds_are_refused_with_the_option_and_its_bounds(
    name: str, allowed: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in allowed:
        assert getattr(GenerateOptions(run=Path("r"), **{name: value}), name) == getattr(Sampling(**{name: value}), name)
    for value in refused:
        with pytest.raises(ConfigError, match=f"^--{name} = .*: (input|string) should "):
            Sampling(**{name: value})
        with pytest.raises(ValidationError):
            GenerateOptions(run=Path("r"), **{name: value})
