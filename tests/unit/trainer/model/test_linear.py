"""Linear layers: the same as PyTorch's up to rounding, whichever library multiplies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainer.model import linear
from trainer.model.linear import Linear, add_product, multiplied_packed, packed_weights, product, product_operators

SIZES = st.integers(1, 70)
has_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs PyTorch with oneDNN")


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PRODUCTS", "oneDNN")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def used(action: Callable[[], object]) -> dict[str, int]:
    """The operators that a call comes down to, and how often."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        action()
    return {event.key: event.count for event in profiler.key_averages()}


@given(st.integers(1, 4), SIZES, SIZES, SIZES, st.booleans(), st.booleans())
def test_a_product_is_that_of_the_formula_for_any_shape_and_layout(
    rows: int, length: int, inner: int, outer: int, turned: bool, transposed: bool
) -> None:
    a = random(rows, inner, length).transpose(1, 2) if turned else random(rows, length, inner)
    b_NK = random(inner, outer, seed=1).T if transposed else random(outer, inner, seed=1)
    exact = a.double() @ b_NK.double().T
    found = product(a, b_NK)
    assert found.shape == (rows, length, outer)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 63), SIZES)
def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(row: int, outer: int) -> None:
    a_MK, b_NK = random(64, 48), random(outer, 48, seed=1)
    others_MK = random(64, 48, seed=2)
    others_MK[row] = a_MK[row]
    assert torch.equal(product(a_MK, b_NK)[row], product(others_MK, b_NK)[row])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 24), (2, 40, 24), (3, 24)])
def test_output_and_gradients_are_those_of_a_plain_layer(shape: tuple[int, ...], *, bias: bool) -> None:
    layer, plain = Linear(24, 56, bias=bias), nn.Linear(24, 56, bias=bias)
    if bias:
        assert not layer.bias.any()
        nn.init.normal_(layer.bias)
    plain.load_state_dict(layer.state_dict())
    found = []
    for module in (layer, plain):
        x = random(*shape).requires_grad_()
        y = module(x)
        (y * random(*y.shape, seed=1)).sum().backward()
        found.append((y, x.grad, *(parameter.grad for parameter in module.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    layer, x = Linear(8, 8), random(64, 8).requires_grad_()
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is None
    layer.weight.requires_grad_(True)
    layer(random(64, 8)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


@has_onednn
@pytest.mark.usefixtures("by_onednn")
def test_many_rows_are_multiplied_by_onednn_and_few_are_not() -> None:
    layer, x = Linear(16, 32), random(64, 16).requires_grad_()
    assert "mkldnn::_linear_pointwise" in used(lambda: layer(x))
    assert "mkldnn::_linear_pointwise" not in used(lambda: layer(x[:8]))
    counts = used(lambda: layer(x).sum().backward())
    assert counts["mkldnn::_linear_pointwise"] == 3, "forward, and the gradients of input and weight"
    assert "aten::mm" not in counts


@has_onednn
@pytest.mark.usefixtures("by_onednn")
@given(st.integers(2, 40), SIZES, SIZES, st.booleans())
def test_packed_weights_give_the_same_products(rows: int, inner: int, outer: int, bias: bool) -> None:
    layer, x = Linear(inner, outer, bias=bias), random(rows, inner)
    with torch.no_grad(), multiplied_packed(packed_weights(layer, rows)):
        torch.testing.assert_close(layer(x), functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@has_onednn
@pytest.mark.usefixtures("by_onednn")
@torch.no_grad()
def test_a_few_rows_are_multiplied_by_onednn_where_its_layout_is_at_hand() -> None:
    layer, x = Linear(16, 32), random(8, 16)
    with multiplied_packed(packed_weights(layer, 8)):
        assert "mkldnn::_linear_pointwise" in used(lambda: layer(x))
        assert "mkldnn::_linear_pointwise" not in used(lambda: layer(x[:1]))
        assert "mkldnn::_linear_pointwise" not in used(lambda: Linear(16, 32)(x))
    assert "mkldnn::_linear_pointwise" not in used(lambda: layer(x))


@pytest.mark.usefixtures("by_onednn")
def test_only_what_onednn_multiplies_faster_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed_weights(nn.Sequential(Linear(8, 8).double(), nn.Linear(8, 8)), 8) == packed_weights(Linear(8, 8), 1) == {}
    monkeypatch.setattr(linear, "PRODUCTS", "MKL")
    assert packed_weights(Linear(8, 8), 8) == {}


def test_where_mkl_is_faster_no_product_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PRODUCTS", "MKL")
    layer, x = Linear(16, 32), random(64, 16).requires_grad_()
    sum_NK = torch.zeros(32, 16)

    def action() -> None:
        y = layer(x)
        y.sum().backward()
        add_product(sum_NK, y.detach().T, x.detach().T)

    counts = used(action)
    assert "mkldnn::_linear_pointwise" not in counts
    assert "_Linear" not in counts, "autograd of PyTorch needs no Python"


@has_onednn
@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
def test_a_product_is_added_in_place(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PRODUCTS", library)
    sum_MN, a_MK, b_NK = random(40, 7), random(40, 50, seed=1), random(7, 50, seed=2)
    expected = sum_MN + a_MK @ b_NK.T
    add_product(sum_MN, a_MK, b_NK)
    torch.testing.assert_close(sum_MN, expected)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_other_types_and_autocast_are_left_to_pytorch(kind: torch.dtype) -> None:
    layer, x = Linear(16, 40), random(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
        assert layer(x).dtype == torch.bfloat16
    layer, x = layer.to(kind), x.to(kind)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))


def test_factors_that_do_not_fit_are_refused_with_their_shapes() -> None:
    with pytest.raises(RuntimeError, match="64x8 and 9x5"):
        product(random(64, 8), random(5, 9))


@has_onednn
@pytest.mark.usefixtures("by_onednn")
def test_selective_checkpointing_keeps_the_products() -> None:
    layer, x = Linear(32, 32), random(64, 32).requires_grad_()

    def products_in_backward(kept: list[Any]) -> int:
        contexts = partial(create_selective_checkpoint_contexts, kept)
        y = checkpoint(lambda x: layer(x.sin()).exp(), x, use_reentrant=False, context_fn=contexts)
        counts = used(lambda: y.sum().backward())
        assert "aten::sin" in counts  # made again, for the gradient of the weight
        return counts["mkldnn::_linear_pointwise"]

    assert products_in_backward(product_operators()) < products_in_backward([])
