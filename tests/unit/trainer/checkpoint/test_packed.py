"""Weights of a compressed model come back from their stored tensors, and tensors that do not belong together are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.checkpoint.packed import is_packed, num_unpacked, pack_int4, pack_sparse, unpack

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 33))


def matrix(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(SHAPES, st.integers(0, 99), st.floats(0, 1))
def test_a_matrix_with_zeros_comes_back_bit_for_bit(shape: tuple[int, int], seed: int, share: float) -> None:
    weight_NK = matrix(shape, seed)
    weight_NK[torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share] = 0
    stored = {f"w.{part}": tensor for part, tensor in pack_sparse(weight_NK).items()}
    assert is_packed(stored)
    assert len(stored["w.values"]) == int((weight_NK != 0).sum())
    assert torch.equal(unpack(stored)["w"], weight_NK)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 99))
def test_four_bits_are_the_integers_times_the_scale_of_their_group(num_rows: int, groups: int, half: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    integers_NK = torch.randint(-8, 8, (num_rows, groups * half * 2), generator=generator, dtype=torch.int8)
    scale_NS = torch.rand(num_rows, groups, generator=generator)
    stored = {"w.qdata": pack_int4(integers_NK), "w.scale": scale_NS, "norm.weight": torch.ones(3)}
    assert stored["w.qdata"].shape == (num_rows, groups * half)
    expected = integers_NK.float() * scale_NS.repeat_interleave(half * 2, dim=1)
    found = unpack(stored)
    assert torch.equal(found["w"], expected)
    assert set(found) == {"w", "norm.weight"}


def test_eight_bits_are_the_integers_times_the_scale_of_their_row() -> None:
    integers = torch.tensor([[-128, 127], [3, 0]], dtype=torch.int8)
    found = unpack({"w.qdata": integers, "w.scale": torch.tensor([[0.5], [2.0]])})
    assert found["w"].tolist() == [[-64.0, 63.5], [6.0, 0.0]]


def test_the_numbers_of_all_weights_are_known_before_they_are_unpacked() -> None:
    pruned = {f"p.{part}": tensor for part, tensor in pack_sparse(torch.zeros(3, 16)).items()}
    four = {"f.qdata": pack_int4(torch.zeros(2, 8, dtype=torch.int8)), "f.scale": torch.ones(2, 4)}
    eight = {"e.qdata": torch.zeros(5, 7, dtype=torch.int8), "e.scale": torch.ones(5, 1)}
    stored = pruned | four | eight | {"norm.weight": torch.ones(11)}
    assert num_unpacked(stored) == 3 * 16 + 2 * 8 + 5 * 7 + 11 == sum(weight.numel() for weight in unpack(stored).values())


GOOD = {"qdata": torch.zeros(2, 4, dtype=torch.int8), "scale": torch.ones(2, 1)}
PRUNED = {
    "values": torch.ones(1),
    "mask": torch.tensor([[1], [0]], dtype=torch.uint8),
    "columns": torch.tensor(4),
}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"qdata": GOOD["qdata"]}, "some are missing"),
        ({**GOOD, "scale": torch.ones(3, 1)}, "do not fit"),
        ({**GOOD, "scale": torch.ones(2, 3)}, "cannot have 3 scales"),
        ({**GOOD, "scale": torch.ones(2, 0)}, "cannot have 0 scales"),
        ({**GOOD, "scale": torch.full((2, 1), torch.inf)}, "not finite"),
        ({**GOOD, "scale": torch.ones(2, 1, dtype=torch.int64)}, "scales of type torch.int64"),
        ({**GOOD, "scale": torch.ones(2, 1).to(torch.float8_e4m3fn)}, "scales of type torch.float8_e4m3fn"),
        ({"qdata": GOOD["qdata"][:0], "scale": torch.ones(0, 1)}, "do not fit"),
        ({"qdata": GOOD["qdata"][:, :0], "scale": torch.ones(2, 1)}, "do not fit"),
        ({**GOOD, "qdata": torch.zeros(2, 4)}, "int8 or uint8"),
        ({**GOOD, "qdata": torch.zeros(8, dtype=torch.int8)}, "do not fit"),
        ({**PRUNED, "values": torch.ones(2)}, "the mask has 1 weights, and there are 2 values"),
        ({**PRUNED, "columns": torch.tensor(9)}, "cannot have 9 columns"),
        ({**PRUNED, "columns": torch.tensor(1 << 60)}, "cannot have"),
        ({**PRUNED, "columns": torch.tensor(-1)}, "cannot have -1 columns"),
        ({**PRUNED, "mask": torch.ones(2, 1)}, "another type or shape"),
        ({**PRUNED, "values": torch.ones(1, dtype=torch.bool)}, "another type or shape"),
        ({**PRUNED, "columns": torch.tensor([4])}, "another type or shape"),
        ({"values": PRUNED["values"], "mask": PRUNED["mask"]}, "some are missing"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused_with_the_name_of_the_weight(parts: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        unpack({f"w.{name}": tensor for name, tensor in parts.items()})
    assert str(caught.value).startswith("w: ")


def test_a_weight_that_is_there_in_two_forms_is_refused() -> None:
    quantised, pruned = ({f"w.{part}": tensor for part, tensor in parts.items()} for parts in (GOOD, PRUNED))
    for stored in (quantised | {"w": torch.zeros(2, 4)}, quantised | pruned):
        with pytest.raises(ValueError, match="w: it is there in two forms"):
            unpack(stored)


TYPES = st.sampled_from(
    [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int64, torch.int8, torch.uint16, torch.uint8, torch.bool]
)
TENSORS = st.builds(
    lambda shape, dtype, value: torch.full(shape, value).to(dtype),
    st.lists(st.sampled_from([0, 1, 2, 4, 8]), max_size=3),
    TYPES,
    st.integers(0, 9),
)


@given(st.dictionaries(st.sampled_from(["w.qdata", "w.scale", "w.values", "w.mask", "w.columns", "w"]), TENSORS))
def test_tensors_of_any_type_and_shape_are_unpacked_or_refused(stored: dict[str, Tensor]) -> None:
    try:
        weights = unpack(stored)
    except ValueError:
        return
    assert sum(weight.numel() for weight in weights.values()) <= num_unpacked(stored)
