from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from data_pipeline.config import PrepareConfig
from data_pipeline.prepare import stage_names


def names(**settings: Any) -> list[str]:
    return stage_names(PrepareConfig(sources=("builtin",), output=Path("data"), **settings))


def test_a_plain_preparation_trains_a_tokenizer_and_judges_no_quality() -> None:
    found = names()
    assert found[0] == "read"
    assert found[-3:] == ["tokenize", "select", "pack"]
    assert {"reference", "classifier", "weigh"}.isdisjoint(found)


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"quality": {"trusted": "manuals"}}, "reference"),
        ({"quality": {"good": ("good.txt",), "bad": ("bad.txt",)}}, "classifier"),
        ({"balance": {"by": "source"}}, "weigh"),
    ],
)
def test_a_setting_adds_its_stage(settings: dict[str, Any], added: str) -> None:
    assert added in names(**settings)


def test_a_tokenizer_of_bytes_needs_no_sample() -> None:
    assert set(names()) - set(names(tokenizer={"kind": "byte"})) == {"sample"}
