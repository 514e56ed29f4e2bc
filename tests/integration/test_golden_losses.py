"""Compares the losses of three recipes bit for bit with those stored in the repository, on each device."""

import json
from pathlib import Path

import pytest

from tests.golden.training import LOSSES, RECIPES, processor, train_recipe
from tests.support.devices import on_each_device


@on_each_device
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_losses_are_those_on_record(recipe: str, device: str, tmp_path: Path) -> None:
    known = json.loads(LOSSES.read_text()).get(processor(device), {})
    if recipe not in known:
        pytest.skip(
            f"no losses of {recipe} on record for {processor(device)}; "
            f"`python -m tests.golden.training` adds them, on a GPU `make gpu`"
        )
    found = train_recipe(recipe, tmp_path, device)
    assert len(found["train"]) == 50
    if found != known[recipe]:  # tells a change of the code from a machine that does not compute the same twice
        again = train_recipe(recipe, tmp_path / "again", device)
        repeated = "the same" if again == found else "the recorded" if again == known[recipe] else "other"
        assert found == known[recipe], f"a second training gives {repeated} losses"
