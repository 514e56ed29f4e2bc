"""Width transfer: models of several widths change by as much in a step, and start as their formulas say."""

from __future__ import annotations

import itertools
import math
import re
from typing import get_args

import pytest
import torch

from docs.draw_width_transfer import BASE_WIDTH, PICTURE, WIDTHS, Kind, logit_change
from trainer.config import ModelConfig
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name

SHAPE = {"layers": 1, "heads": 4, "context": 8, "vocab_multiple": 1}


@pytest.mark.long
@pytest.mark.parametrize("kind", get_args(Kind))
def test_the_logits_of_four_widths_change_by_as_much_with_transfer_and_by_more_and_more_without_it(kind: Kind) -> None:
    on = [logit_change(kind, width, BASE_WIDTH) for width in WIDTHS]
    off = [logit_change(kind, width, None) for width in WIDTHS]
    assert max(on) / min(on) < 1.5
    assert off[-1] / off[0] > 2.5
    assert all(wide > narrow for narrow, wide in itertools.pairwise(off))
    assert on[0] == off[0]  # nothing is scaled at the base width


def test_the_picture_in_the_docs_shows_a_flat_line_with_transfer() -> None:
    lines = re.findall(r"model.base_width (none|64): ([0-9., ]+)<", PICTURE.read_text())
    assert [base for base, _ in lines] == ["none", "64"] * 2
    for base, numbers in lines:
        changes = [float(number) for number in numbers.split(",")]
        assert len(changes) == len(WIDTHS)
        assert (max(changes) / min(changes) < 1.5) == (base == "64")


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_are_scaled_from_the_base_width(tied: bool) -> None:
    plain = parameters_by_name(build_model(ModelConfig(**SHAPE, width=64, tie_embeddings=tied), 50, 1))
    scaled = parameters_by_name(build_model(ModelConfig(**SHAPE, width=64, base_width=16, tie_embeddings=tied), 50, 1))
    for name, weight in plain.items():
        factor = 1.0
        if ".layers." in name and weight.ndim == 2:
            factor = 1 / math.sqrt(4)
        elif name == "model.norm.weight":
            factor = 1 / 4
        assert torch.equal(scaled[name], weight * factor), name


def test_at_the_base_width_and_without_one_every_bit_is_the_same() -> None:
    plain = parameters_by_name(build_model(ModelConfig(**SHAPE, width=48), 50, 1))
    at_base = parameters_by_name(build_model(ModelConfig(**SHAPE, width=48, base_width=48), 50, 1))
    assert all(torch.equal(plain[name], weight) for name, weight in at_base.items())
