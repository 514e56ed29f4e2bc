"""Compares the losses of three recipes bit for bit with those stored in the repository."""

import json
from pathlib import Path

import pytest

from tests.golden.training import LOSSES, RECIPES, processor, train_recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_losses_are_those_on_record(recipe: str, tmp_path: Path) -> None:
    known = json.loads(LOSSES.read_text())
    if processor() not in known:
        pytest.skip(f"no losses on record for {processor()}; `python -m tests.golden.training` adds them")
    found = train_recipe(recipe, tmp_path)
    assert len(found["train"]) == 50
    assert found == known[processor()][recipe]
