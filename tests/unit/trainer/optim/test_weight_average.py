from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from common.errors import CheckpointError
from tests.support.ranks import run_ranks
from trainer.config import EmaConfig, ModelConfig
from trainer.distributed.group import Group
from trainer.model.decoder import build_model
from trainer.model.parameters import parameters_by_name
from trainer.optim.weight_average import WeightAverage, decay_at
from trainer.parallel.fsdp import full_tensors, load_full, shard

CONFIG = ModelConfig(layers=1, width=16, heads=2, context=8, vocab_multiple=1)
EMA = EmaConfig(decay=0.9, warmup_steps=5)


def new_model(*, tie_embeddings: bool = True) -> nn.Module:
    return build_model(CONFIG.model_copy(update={"tie_embeddings": tie_embeddings}), 20, seed=1)


def move_weights(model: nn.Module, step: int) -> None:
    """Change every weight as a function of the step, in place of training."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in parameters_by_name(model).values():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)


def bits(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items()}


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def test_the_decay_rises_by_its_formula_to_the_one_that_is_set() -> None:
    rising = [decay_at(EMA, step) for step in range(1, 8)]
    assert rising == pytest.approx([2 / 6, 3 / 7, 4 / 8, 5 / 9, 6 / 10, 7 / 11, 8 / 12])
    assert [decay_at(EMA, step) for step in (34, 35, 36, 10**9)] == pytest.approx([35 / 39, 0.9, 0.9, 0.9])


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_without_warmup_the_decay_is_constant(warmup_steps: int) -> None:
    config = EmaConfig(decay=0.999, warmup_steps=warmup_steps)
    assert {decay_at(config, step) for step in (1, 2, 3, 100, 10**9)} == {0.999}


@given(decay=st.floats(0.01, 0.9999), warmup_steps=st.integers(0, 1000), step=st.integers(1, 10**6))
def test_the_decay_never_falls_and_never_exceeds_the_one_that_is_set(decay: float, warmup_steps: int, step: int) -> None:
    config = EmaConfig(decay=decay, warmup_steps=warmup_steps)
    assert 0 < decay_at(config, step) <= decay_at(config, step + 1) <= decay


def test_the_average_equals_its_formula_written_out() -> None:
    model = new_model()
    average = WeightAverage(model, EMA)
    expected = {name: weight.double() for name, weight in parameters_by_name(model).items()}
    for step in range(1, 51):
        move_weights(model, step)
        average.update(step)
        decay = min(0.9, (1 + step) / (5 + step))
        for name, weight in parameters_by_name(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * weight.double()
    for name, tensor in average.tensors().items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_the_average_begins_as_the_weights_that_it_was_made_from() -> None:
    model = new_model()
    average = WeightAverage(model, EMA)
    first = bits(parameters_by_name(model))
    move_weights(model, 1)
    assert bits(average.tensors()) == first


def test_a_weight_that_does_not_change_keeps_its_bits_in_the_average() -> None:
    model = new_model()
    average = WeightAverage(model, EmaConfig(decay=0.999, warmup_steps=7))
    for step in range(1, 200):
        average.update(step)
    assert bits(average.tensors()) == bits(parameters_by_name(model))


def test_weights_of_two_bytes_are_averaged_in_fp32() -> None:
    model = nn.Linear(4, 4, bias=False).bfloat16()
    average = WeightAverage(model, EmaConfig(decay=0.999, warmup_steps=0))
    start = average.tensors()["weight"].clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    average.update(1)
    torch.testing.assert_close(average.tensors()["weight"], start + 0.001 * (model.weight.float() - start))
    with average.swapped_in():
        assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_a_skipped_step_leaves_the_average_and_another_does_what_no_verdict_does(skip: float) -> None:
    model = new_model()
    average, plain = WeightAverage(model, EMA), WeightAverage(model, EMA)
    before = bits(average.tensors())
    move_weights(model, 1)
    average.update(1, torch.tensor(skip))
    plain.update(1)
    assert bits(average.tensors()) == (before if skip else bits(plain.tensors()))
    assert bits(plain.tensors()) != before


@settings(max_examples=10)
@given(stop=st.integers(0, 20))
def test_an_average_that_is_resumed_at_any_step_ends_with_the_same_bits(stop: int) -> None:
    model = new_model()
    whole, resumed = WeightAverage(model, EMA), WeightAverage(model, EMA)
    for step in range(1, 21):
        if step == stop + 1:
            saved = copies(resumed.tensors())
            resumed = WeightAverage(model, EMA)
            resumed.restore(saved)
        move_weights(model, step)
        whole.update(step)
        resumed.update(step)
    assert bits(resumed.tensors()) == bits(whole.tensors())


def test_inside_the_swap_the_model_has_the_average_and_after_it_its_own_bits() -> None:
    model = new_model()
    average = WeightAverage(model, EMA)
    move_weights(model, 1)
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = -0.0  # a sign that arithmetic would lose
    average.update(1)
    trained, averaged = bits(parameters_by_name(model)), bits(average.tensors())
    with average.swapped_in():
        assert bits(parameters_by_name(model)) == averaged
        assert bits(average.tensors()) == averaged
    assert bits(parameters_by_name(model)) == trained
    assert bits(average.tensors()) == averaged


def test_the_weights_come_back_when_the_body_of_the_swap_fails() -> None:
    model = new_model()
    average = WeightAverage(model, EMA)
    move_weights(model, 1)
    trained = bits(parameters_by_name(model))

    def fail_inside() -> None:
        with average.swapped_in():
            assert bits(parameters_by_name(model)) != trained
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_inside()
    assert bits(parameters_by_name(model)) == trained


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_shared_weights_are_averaged_once_and_stay_shared(tie_embeddings: bool) -> None:
    model = new_model(tie_embeddings=tie_embeddings)
    average = WeightAverage(model, EMA)
    move_weights(model, 1)
    average.update(1)
    assert ("lm_head.weight" in average.tensors()) != tie_embeddings
    with average.swapped_in():
        shared = model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
        assert shared == tie_embeddings


@pytest.mark.parametrize("damage", ["missing", "unknown", "shape", "type"])
def test_an_average_of_another_model_is_refused_and_nothing_is_changed(damage: str) -> None:
    average = WeightAverage(new_model(), EMA)
    before = bits(average.tensors())
    saved = {name: tensor + 1 for name, tensor in average.tensors().items()}
    weight = saved["model.norm.weight"]
    if damage == "missing":
        del saved["model.norm.weight"]
    elif damage == "unknown":
        saved["model.norm.bias"] = weight
    else:
        saved["model.norm.weight"] = weight[1:] if damage == "shape" else weight.double()
    with pytest.raises(CheckpointError, match=r"average of the weights .*model\.norm"):
        average.restore(saved)
    assert bits(average.tensors()) == before


@dataclass(frozen=True)
class ShardedOutcome:
    """The results of three steps with sharded weights on one rank. Tensors are whole on rank 0."""

    average: dict[str, bytes]
    inside_swap: dict[str, bytes]
    after_swap: dict[str, bytes]


def average_in_parts(group: Group) -> ShardedOutcome:
    """Run three updates, with a resume before the last one and a skipped update after it."""
    whole, sharded = new_model(), new_model()
    shard(sharded, group)
    average = WeightAverage(sharded, EMA)
    for step in (1, 2, 3):
        move_weights(whole, step)
        load_full(sharded, dict(parameters_by_name(whole)))
        if step == 3:
            saved, average = copies(average.tensors()), WeightAverage(sharded, EMA)
            average.restore(saved)
        average.update(step, None if step == 1 else torch.tensor(0.0))
    average.update(4, torch.tensor(1.0))
    weights = dict(parameters_by_name(sharded))
    with average.swapped_in():
        inside = bits(full_tensors(weights, group))
    return ShardedOutcome(bits(full_tensors(average.tensors(), group)), inside, bits(full_tensors(weights, group)))


def test_sharded_weights_have_the_same_average_as_whole_ones() -> None:
    outcome = run_ranks(average_in_parts, 2)[0]
    model = new_model()
    average = WeightAverage(model, EMA)
    for step in (1, 2, 3):
        move_weights(model, step)
        average.update(step)
    assert outcome.average == outcome.inside_swap == bits(average.tensors())
    assert outcome.after_swap == bits(parameters_by_name(model))


def test_frozen_weights_have_no_average_and_those_of_an_older_checkpoint_are_ignored() -> None:
    model = new_model()
    whole = copies(WeightAverage(model, EMA).tensors())
    parameters_by_name(model)["model.norm.weight"].requires_grad_(requires_grad=False)
    average = WeightAverage(model, EMA)
    assert average.tensors().keys() == whole.keys() - {"model.norm.weight"}
    average.update(1)
    average.restore(whole)
    assert bits(average.tensors()) == bits({name: whole[name] for name in average.tensors()})
    with pytest.raises(CheckpointError, match="unknown"):
        average.restore(whole | {"other": torch.zeros(1)})
