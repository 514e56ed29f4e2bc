import math
import weakref
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from trainer.config import ModelConfig
from trainer.distributed.group import Group
from trainer.metrics import layers
from trainer.metrics.layers import BIN_LIMITS, Histogram, LayerNorms, LayerObserver, LayerReading, layer_of
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name
from trainer.parallel.fsdp import shard

ALONE = Group(0, 1, 0, torch.device("cpu"))
SHAPE = ModelConfig(layers=11, width=16, heads=2, kv_heads=2, context=16, mlp_width=24, vocab_multiple=1)
LAYERS = ["lm_head", "model.embed_tokens", "model.norm", *(f"model.layers.{number}" for number in range(11))]


def model_with_gradients(seed: int = 0, *, tied: bool = False) -> nn.Module:
    model = build_model(SHAPE.model_copy(update={"tie_embeddings": tied}), 40, seed)
    generator = torch.Generator().manual_seed(seed)
    for weight in parameters_by_name(model).values():
        weight.grad = torch.randn(weight.shape, generator=generator) * 0.1
    return model


def observed(model: nn.Module, observer: LayerObserver, step: int, rate: float = 0.1) -> LayerReading | None:
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    observer.before_update(step)
    optimizer.step()
    observer.after_update(step)
    return observer.reading(step)


def of_layer(model: nn.Module, layer: str) -> list[nn.Parameter]:
    return [weight for name, weight in parameters_by_name(model).items() if layer_of(name) == layer]


def norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.detach().double().square().sum()) for tensor in tensors))


def test_a_layer_is_named_by_what_stands_before_the_first_number() -> None:
    assert layer_of("model.layers.3.mlp.up_proj.weight") == "model.layers.3"
    assert layer_of("model.layers.10.weight") == "model.layers.10"
    assert layer_of("model.norm.weight") == "model.norm"
    assert layer_of("lm_head.weight") == "lm_head"
    assert layer_of("scale") == "scale"


def test_norms_are_those_of_a_plain_computation_in_the_order_of_the_layers() -> None:
    model = model_with_gradients()
    before = {name: weight.detach().clone() for name, weight in parameters_by_name(model).items()}
    reading = observed(model, LayerObserver(model, ALONE, 5, 0), 5)
    assert reading is not None
    assert list(reading.norms) == LAYERS
    assert not reading.weights
    for layer, found in reading.norms.items():
        weights = of_layer(model, layer)
        old = [before[name] for name in before if layer_of(name) == layer]
        assert found.gradient == pytest.approx(norm([weight.grad for weight in weights if weight.grad is not None]))
        assert found.weight == pytest.approx(norm(old))
        assert found.update == pytest.approx(norm([new.detach() - was for new, was in zip(weights, old, strict=True)]), rel=1e-4)
        assert found.update_ratio == pytest.approx(found.update / found.weight)


def test_a_step_that_is_not_due_measures_nothing() -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 10, 20)
    assert [step for step in range(1, 41) if observed(model, observer, step, 0.0) is not None] == [1, 10, 20, 30, 40]
    never = LayerObserver(model, ALONE, 0, 0)
    assert observed(model, never, 1) is None


def test_norms_and_histograms_have_intervals_of_their_own() -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 4, 6)
    found = {step: observed(model, observer, step, 0.0) for step in range(2, 13)}
    assert [step for step, reading in found.items() if reading and reading.norms] == [4, 8, 12]
    assert [step for step, reading in found.items() if reading and reading.weights] == [6, 12]


def test_an_update_that_was_withheld_has_changed_nothing() -> None:
    model = model_with_gradients()
    reading = observed(model, LayerObserver(model, ALONE, 1, 0), 1, rate=0.0)
    assert reading is not None
    assert {norms.update_ratio for norms in reading.norms.values()} == {0.0}


def test_training_has_the_same_bits_with_and_without_an_observer() -> None:
    watched, alone = model_with_gradients(3), model_with_gradients(3)
    observed(watched, LayerObserver(watched, ALONE, 1, 1), 1)
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for name, weight in parameters_by_name(watched).items():
        assert torch.equal(weight, parameters_by_name(alone)[name]), name


def test_a_gradient_that_is_not_finite_shows_in_its_layer_alone() -> None:
    model = model_with_gradients()
    [gradient] = [weight.grad for weight in of_layer(model, "model.norm")]
    assert gradient is not None
    gradient[0] = math.nan
    observer = LayerObserver(model, ALONE, 1, 1)
    observer.before_update(1)
    observer.after_update(1)
    reading = observer.reading(1)
    assert reading is not None
    assert [layer for layer, norms in reading.norms.items() if not math.isfinite(norms.gradient)] == ["model.norm"]
    assert reading.gradients["model.norm"].counts[-1] == 1
    assert all(math.isfinite(norms.weight) for norms in reading.norms.values())


def test_a_frozen_layer_is_left_out_and_one_without_a_gradient_has_none() -> None:
    model = model_with_gradients()
    for weight in of_layer(model, "model.embed_tokens"):
        weight.requires_grad_(False)
    for weight in of_layer(model, "lm_head"):
        weight.grad = None
    reading = observed(model, LayerObserver(model, ALONE, 1, 0), 1)
    assert reading is not None
    assert "model.embed_tokens" not in reading.norms
    assert (reading.norms["lm_head"].gradient, reading.norms["lm_head"].update) == (0.0, 0.0)


def test_weights_that_are_shared_count_once() -> None:
    model = model_with_gradients(tied=True)
    reading = observed(model, LayerObserver(model, ALONE, 1, 0), 1)
    assert reading is not None
    assert list(reading.norms) == [layer for layer in LAYERS if layer == "model.embed_tokens" or layer != "lm_head"]


def test_histograms_count_every_value_in_its_bin() -> None:
    model = model_with_gradients()
    values = np.concatenate([weight.detach().numpy().ravel() for weight in of_layer(model, "model.layers.2")])
    reading = observed(model, LayerObserver(model, ALONE, 0, 1), 1)
    assert reading is not None
    found = reading.weights["model.layers.2"]
    edges = np.array([-np.inf, *BIN_LIMITS, np.inf])
    expected = [int(((values > low) & (values <= high)).sum()) for low, high in pairwise(edges)]
    assert found.counts.tolist() == expected
    assert found.total == pytest.approx(float(values.sum(dtype=np.float64)))
    assert found.squares == pytest.approx(float(np.square(values, dtype=np.float64).sum()))


@given(st.lists(st.floats(width=32), min_size=1, max_size=60))
def test_no_value_is_lost_by_a_histogram(values: list[float]) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(values, dtype=torch.float32))

    observer = LayerObserver(Layer(), ALONE, 0, 1)
    observer.before_update(1)
    observer.after_update(1)
    reading = observer.reading(1)
    assert reading is not None
    assert int(reading.weights["weight"].counts.sum()) == len(values)


class Operations(TorchDispatchMode):
    """The names of what is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_histograms_add_nothing_by_index_which_deterministic_algorithms_do_one_value_after_the_other() -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 0, 1)
    with Operations() as operations:
        observer.before_update(1)
    assert "searchsorted" in operations.names
    assert not {name for name in operations.names if name.startswith(("index_", "scatter", "bincount"))}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, 1.0, -1.0, BIN_LIMITS[0], BIN_LIMITS[-1], 3e38, -3e38])
def test_a_value_on_a_limit_is_below_it_and_one_that_is_no_number_is_in_the_last_bin(value: float) -> None:
    layer = nn.Linear(3, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    observer = LayerObserver(layer, ALONE, 0, 1)
    observer.before_update(1)
    observer.after_update(1)
    reading = observer.reading(1)
    assert reading is not None
    bin_of_value = len(BIN_LIMITS) if math.isnan(value) else bisect_left(BIN_LIMITS, value)
    assert np.flatnonzero(reading.weights["weight"].counts).tolist() == [bin_of_value]


def test_the_limits_rise_and_leave_zero_in_the_middle() -> None:
    assert list(BIN_LIMITS) == sorted(set(BIN_LIMITS))
    assert len(BIN_LIMITS) % 2 == 0
    middle = len(BIN_LIMITS) // 2
    assert BIN_LIMITS[middle - 1] < 0 < BIN_LIMITS[middle]


def test_a_ratio_of_weights_that_were_zero_is_zero_or_infinite() -> None:
    assert LayerNorms(1.0, 0.0, 0.0).update_ratio == 0.0
    assert LayerNorms(1.0, 0.0, 0.1).update_ratio == math.inf


def test_what_is_forgotten_is_never_read() -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 1, 0)
    observer.before_update(1)
    observer.after_update(1)
    observer.forget()
    assert observer.reading(1) is None


def test_a_step_that_broke_off_leaves_nothing_behind() -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 10, 0)
    observer.before_update(10)  # and memory ran out
    observer.before_update(11)
    observer.after_update(11)
    assert observer.reading(11) is None


def test_a_step_that_broke_off_holds_no_copy_of_the_weights_while_it_is_made_again() -> None:
    layer = nn.Linear(30, 10, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    observer = LayerObserver(layer, ALONE, 1, 0)
    copies: list[weakref.ref[Tensor]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ == "clone":
                copies.append(weakref.ref(made))
            return made

    with Copies():
        observer.before_update(1)
    assert [copy() is not None for copy in copies] == [True]
    observer.forget()
    assert [copy() for copy in copies] == [None]


def measure_sharded(group: Group) -> LayerReading | None:
    """The norms and histograms of the model of these tests, cut up over the ranks."""
    model = model_with_gradients()
    gradients = {name: weight.grad for name, weight in parameters_by_name(model).items()}
    shard(model, group)
    for name, weight in parameters_by_name(model).items():
        gradient = gradients[name]
        assert gradient is not None
        weight.grad = torch.distributed.tensor.distribute_tensor(gradient, weight.device_mesh, weight.placements)  # type: ignore[attr-defined]
    return observed(model, LayerObserver(model, group, 1, 1), 1)


def measure_replicated(group: Group) -> LayerReading | None:
    """The same, whole on every rank."""
    model = model_with_gradients()
    return observed(model, LayerObserver(model, group, 1, 1), 1)


def test_three_ranks_that_share_the_weights_find_what_one_rank_finds() -> None:
    expected = measure_replicated(ALONE)
    assert expected is not None
    first, *others = run_ranks(measure_sharded, 3)
    assert others == [None, None]
    assert first is not None
    for layer, norms in expected.norms.items():
        found = first.norms[layer]
        assert (found.gradient, found.weight, found.update) == pytest.approx((norms.gradient, norms.weight, norms.update), rel=1e-5)
        assert_same(first.gradients[layer], expected.gradients[layer])
        assert_same(first.weights[layer], expected.weights[layer])


def assert_same(found: Histogram, expected: Histogram) -> None:
    assert found.counts.tolist() == expected.counts.tolist()
    assert (found.total, found.squares) == pytest.approx((expected.total, expected.squares), rel=1e-5)


def test_where_all_ranks_have_the_same_only_the_first_measures() -> None:
    assert measure_replicated(Group(1, 2, 1, torch.device("cpu"))) is None
    assert measure_replicated(Group(0, 2, 0, torch.device("cpu"))) is not None


def run_short_of_memory(group: Group) -> LayerReading | None:
    """Sharded weights, and the last rank cannot take its copy of them."""
    if group.rank == group.world_size - 1:
        layers._squares = out_of_memory  # type: ignore[attr-defined]
    return measure_sharded(group)


def out_of_memory(_tensors: list[Tensor]) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_step_goes_on_where_memory_does_not_suffice_to_measure_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_with_gradients()
    observer = LayerObserver(model, ALONE, 1, 1)
    with monkeypatch.context() as patched:
        patched.setattr(layers, "_squares", out_of_memory)
        assert observed(model, observer, 1) is None
    assert caplog.text.count("too little memory to measure the layers in this step; training continues") == 1
    assert observed(model, observer, 2) is not None


def test_a_rank_that_cannot_measure_leaves_no_other_waiting() -> None:
    assert run_ranks(run_short_of_memory, 2) == [None, None]


def test_any_other_error_is_no_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_tensors: list[Tensor]) -> Tensor:
        raise RuntimeError("a bug")

    monkeypatch.setattr(layers, "_squares", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        LayerObserver(model_with_gradients(), ALONE, 1, 0).before_update(1)
