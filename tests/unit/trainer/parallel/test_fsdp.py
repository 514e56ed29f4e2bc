"""Two gloo ranks train a small decoder with FSDP and with DDP. The tests compare the results.

All trainings run in one pair of processes, `experiments`, because starting processes takes longer than training.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from common.errors import CheckpointError, ConfigError
from tests.support.ranks import RankError, run_ranks
from tests.support.runs import tiny_config
from trainer.config import ModelConfig
from trainer.distributed.group import Group
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import Decoder, build_model
from trainer.model.parameters import parameters_by_name
from trainer.parallel.accumulation import DdpAccumulation, FsdpAccumulation
from trainer.parallel.fsdp import check_parallel, distribute_like, full_tensors, gathered, load_full, shard

VOCAB = 51
"""An odd number, so that the two parts of the embedding differ in size."""
MODEL = ModelConfig(layers=2, width=16, heads=2, context=12, vocab_multiple=1)
STEPS = 10
TARGETS = 2 * 2 * 2 * 12
"""Targets of a global batch: ranks, micro-batches per rank, rows, tokens per row."""


class Loss(nn.Module):
    """The decoder with a loss that, as in training, uses the output matrix outside the forward method of the decoder."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens_BL: Tensor, layout: Layout, targets_BL: Tensor) -> Tensor:
        logits_BLV = self.model.hidden(tokens_BL, layout) @ self.model.lm_head.weight.T
        return nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum")


@dataclass(frozen=True)
class State:
    """Whole tensors, as in a checkpoint."""

    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    """Loss of the global batch at each step."""
    norms: list[float]
    state: State
    """The state on rank 0; empty on other ranks."""
    logits: Tensor
    """Logits of one fixed batch at the end."""


def batch(seed: int) -> tuple[Tensor, Layout, Tensor]:
    """Return two rows of 12 tokens with two documents each, and random targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens_BL, targets_BL = torch.randint(0, VOCAB, (2, 2, 12), generator=generator)
    segments_BL = torch.tensor([0] * 5 + [1] * 7, dtype=torch.int32).expand(2, 12)
    positions_BL = torch.tensor([*range(5), *range(7)]).expand(2, 12)
    return tokens_BL, make_layout(segments_BL, positions_BL), targets_BL


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    parameters = parameters_by_name(model)
    return {f"{name}/{kind}": value for name, weight in parameters.items() for kind, value in optimizer.state[weight].items()}


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    parameters = parameters_by_name(model)
    for key, value in distribute_like(parameters, moments).items():
        name, _, kind = key.rpartition("/")
        optimizer.state[parameters[name]][kind] = value.clone()


def train(group: Group, parallel: str, *, tied: bool = True, steps: range = range(STEPS), begin: State | None = None) -> Outcome:
    """Train a new model, or resume from a state, with AdamW and clipping. Each rank has two micro-batches."""
    model = build_model(MODEL.model_copy(update={"tie_embeddings": tied}), VOCAB, seed=3)
    loss = Loss(model)
    module: nn.Module
    if parallel == "fsdp":
        module = sharded = shard(loss, group)
        accumulation: FsdpAccumulation | DdpAccumulation = FsdpAccumulation(sharded, list(model.parameters()))
        if begin:
            load_full(model, begin.weights)
    else:
        if begin:
            load_full(model, begin.weights)
        module = ddp = DistributedDataParallel(loss)
        accumulation = DdpAccumulation(ddp, list(model.parameters()))
    optimizer = torch.optim.AdamW(parameters_by_name(model).values(), lr=1e-2, fused=True)
    if begin:
        restore(model, optimizer, begin.moments)
    losses, norms = [], []
    scale = (group.world_size if accumulation.averages else 1) / TARGETS
    for step in steps:
        accumulation.begin()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(2):
            with accumulation.micro_batch(last=micro == 1):
                micro_sum = module(*batch(step * 4 + group.rank * 2 + micro))
                (micro_sum * scale).backward()
            total += micro_sum.detach()
        norm = nn.utils.clip_grad_norm_(parameters_by_name(model).values(), 0.5)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        optimizer.step()
        losses.append(group.sum(total).item() / TARGETS)
    state = State(full_tensors(parameters_by_name(model), group), full_tensors(moments_of(model, optimizer), group))
    logits = gathered(module, lambda: model(*batch(999)[:2]))
    return Outcome(losses, norms, state, logits)


def loss_after_calls_without_gradients(group: Group) -> tuple[set[str], bool, list[float]]:
    """Call a sharded model in every way without a backward pass, once with an error, and then train it."""
    model = build_model(MODEL, VOCAB, seed=3)
    root = shard(Loss(model), group)
    tokens_BL, layout, targets_BL = batch(0)

    def both() -> tuple[Tensor, Tensor]:
        return root(tokens_BL, layout, targets_BL), model(tokens_BL, layout)

    def fail() -> None:
        model(tokens_BL, layout)
        raise KeyError("of the action")

    with torch.no_grad():
        alone = root(tokens_BL, layout, targets_BL)
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    inside, logits_BLV = gathered(root, both)
    summed = nn.functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum")
    with pytest.raises(KeyError, match="of the action"):
        gathered(root, fail)
    kinds |= {type(parameter).__name__ for parameter in model.parameters()}
    trained = root(tokens_BL, layout, targets_BL)
    trained.backward()
    return (
        kinds,
        torch.equal(logits_BLV, build_model(MODEL, VOCAB, seed=3)(tokens_BL, layout)),
        [value.item() for value in (alone, inside, summed, trained)],
    )


def skipped_update(group: Group, bad_rank: int) -> list[tuple[float, int]]:
    """Return scale and number of updates after each of three scaled steps. A gradient overflows on one rank in the second."""
    model = build_model(MODEL, VOCAB, seed=3)
    root = shard(Loss(model), group)
    weight = model.model.norm.weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    history = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(root(*batch(step * 2 + group.rank))).backward()
        if step == 1 and group.rank == bad_rank:
            assert isinstance(weight.grad, DTensor)
            weight.grad.to_local()[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), int(optimizer.state[weight]["step"])))
    return history


def order_of_a_backward_pass(group: Group) -> list[str]:
    root = shard(Loss(build_model(MODEL, VOCAB, seed=3)), group)
    loss = root(*batch(group.rank))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("FSDP::")]


def experiments(group: Group) -> dict[str, Any]:
    outcomes: dict[str, Any] = {
        "order": order_of_a_backward_pass(group),
        "ddp": train(group, "ddp"),
        "fsdp": train(group, "fsdp"),
        "fsdp again": train(group, "fsdp"),
        "ddp untied": train(group, "ddp", tied=False, steps=range(3)),
        "fsdp untied": train(group, "fsdp", tied=False, steps=range(3)),
        "calls": loss_after_calls_without_gradients(group),
        "skipped": [skipped_update(group, bad_rank) for bad_rank in (0, 1)],
    }
    halves = {kind: on_all_ranks(group, train(group, kind, steps=range(5)).state) for kind in ("ddp", "fsdp")}
    for first, then in (("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")):
        outcomes[f"{first} to {then}"] = train(group, then, steps=range(5, STEPS), begin=halves[first])
        outcomes[f"{first} as {then}"] = (halves[first], train(group, then, steps=range(0), begin=halves[first]))
    return outcomes


def on_all_ranks(group: Group, state: State) -> State:
    return group.on_main(lambda: state)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_ranks(experiments, 2)


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("model", ["", " untied"])
def test_fsdp_trains_as_ddp_does(outcomes: list[dict[str, Any]], model: str) -> None:
    for outcome in outcomes:
        ddp, fsdp = outcome[f"ddp{model}"], outcome[f"fsdp{model}"]
        assert len(fsdp.losses) == len(ddp.losses) > 0
        assert fsdp.losses == pytest.approx(ddp.losses, abs=1e-6, rel=0)
        assert fsdp.norms == pytest.approx(ddp.norms, rel=1e-5)
    for name, weight in outcomes[0][f"ddp{model}"].state.weights.items():
        torch.testing.assert_close(outcomes[0][f"fsdp{model}"].state.weights[name], weight, atol=1e-5, rtol=0, msg=name)


def test_the_same_run_twice_gives_the_same_bits(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        first, second = outcome["fsdp"], outcome["fsdp again"]
        assert first.losses == second.losses
        assert first.norms == second.norms
    first, second = outcomes[0]["fsdp"].state, outcomes[0]["fsdp again"].state
    assert same(first.weights, second.weights)
    assert same(first.moments, second.moments)


@pytest.mark.parametrize(("first", "then"), [("ddp", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp")])
def test_a_state_saved_under_one_is_the_same_state_under_the_other(outcomes: list[dict[str, Any]], first: str, then: str) -> None:
    saved, loaded = outcomes[0][f"{first} as {then}"]
    assert same(loaded.state.weights, saved.weights)
    assert same(loaded.state.moments, saved.moments)
    assert {key.rpartition("/")[2] for key in saved.moments} == {"exp_avg", "exp_avg_sq", "step"}
    alone = build_model(MODEL, VOCAB, seed=0)
    load_full(alone, saved.weights)
    assert torch.equal(loaded.logits, alone(*batch(999)[:2]))
    assert outcomes[0][f"{first} to {then}"].losses == pytest.approx(outcomes[0]["ddp"].losses[5:], abs=1e-6, rel=0)


def test_only_the_weights_that_are_listed_as_new_may_be_missing() -> None:
    source, model = build_model(MODEL, VOCAB, seed=0), build_model(MODEL, VOCAB, seed=1)
    weights = {name: weight.detach() for name, weight in parameters_by_name(source).items()}
    norm = "model.norm.weight"
    model.get_parameter(norm).data.fill_(3.0)
    without = {name: weight for name, weight in weights.items() if name != norm}
    with pytest.raises(CheckpointError, match=rf"1 weights .* such as {norm}: saved nothing, needed 16; ask again"):
        load_full(model, without, remedy="ask again")
    with pytest.raises(CheckpointError, match="such as surplus: saved 2, needed nothing"):
        load_full(model, weights | {"surplus": torch.zeros(2)}, new=["surplus"])
    with pytest.raises(CheckpointError, match=f"such as {norm}: saved 2, needed 16"):
        load_full(model, without | {norm: torch.zeros(2)}, new=[norm])
    load_full(model, without, new=[norm])
    assert model.get_parameter(norm).unique().item() == 3.0
    assert same({name: weight.detach() for name, weight in parameters_by_name(model).items() if name != norm}, without)
    load_full(model, weights, new=[norm])
    assert model.get_parameter(norm).unique().item() == 1.0


def test_a_run_under_fsdp_goes_on_with_the_bits_of_one_that_was_not_stopped(outcomes: list[dict[str, Any]]) -> None:
    whole, resumed = outcomes[0]["fsdp"], outcomes[0]["fsdp to fsdp"]
    assert resumed.losses == whole.losses[5:]
    assert same(resumed.state.weights, whole.state.weights)
    assert same(resumed.state.moments, whole.state.moments)


def test_the_weights_of_the_next_layer_are_gathered_and_gradients_scattered_while_the_backward_pass_runs(
    outcomes: list[dict[str, Any]],
) -> None:
    """The backward pass goes from the last layer to the first."""
    for outcome in outcomes:
        first, last = (f"model.model.layers.{number}" for number in (0, 1))
        steps = [
            f"FSDP::pre_backward ({last})",
            f"FSDP::all_gather ({first})",
            f"FSDP::post_backward_reduce ({last})",
            f"FSDP::pre_backward ({first})",
            f"FSDP::post_backward_reduce ({first})",
        ]
        assert [name for name in outcome["order"] if name in steps] == steps


def test_only_rank_0_keeps_whole_tensors(outcomes: list[dict[str, Any]]) -> None:
    assert outcomes[0]["fsdp"].state.weights["model.embed_tokens.weight"].shape == (VOCAB, MODEL.width)
    assert outcomes[1]["fsdp"].state == State({}, {})


def test_calls_without_gradients_leave_the_weights_in_parts_and_the_numbers_as_they_are(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        kinds, equal_logits, (alone, *others) = outcome["calls"]
        assert kinds == {"DTensor"}
        assert equal_logits
        assert others == pytest.approx([alone] * 3, rel=1e-6)


def test_an_overflow_in_one_ranks_part_makes_all_ranks_skip_the_update(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert outcome["skipped"] == [[(64.0, 1), (32.0, 1), (32.0, 2)]] * 2


def test_gathered_calls_the_action_of_any_other_module_without_gradients() -> None:
    assert gathered(nn.Linear(1, 1), torch.is_grad_enabled) is False


def test_ranks_with_unequal_numbers_of_micro_batches_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, parallel="fsdp", batch={"global_batch_size": 8, "micro_batch_size": 2})
    for world_size in (1, 2, 4):
        check_parallel(config.parallel, config.batch, world_size)
    with pytest.raises(ConfigError, match=r"make 4 for 3 ranks; choose batch.global_batch_size as a multiple of 6,"):
        check_parallel(config.parallel, config.batch, 3)
    ddp = config.model_copy(update={"parallel": "ddp"})
    check_parallel(ddp.parallel, ddp.batch, 3)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear has no torch\.nn\.ModuleList of layers"):
        shard(nn.Linear(2, 2), Group(0, 2, 0, torch.device("cpu")))


def fail_on_rank_1(group: Group) -> Tensor:
    if group.rank == 1:
        raise KeyError("only here")
    return group.sum(torch.ones(1))


def wait_for_ever(group: Group) -> None:
    if group.rank == 0:
        time.sleep(1000)


def rank_and_argument(group: Group, argument: str) -> tuple[int, int, str]:
    return group.rank, int(group.sum(torch.tensor(group.rank))), argument


def test_results_come_in_the_order_of_the_ranks() -> None:
    assert run_ranks(rank_and_argument, 3, "a") == [(0, 3, "a"), (1, 3, "a"), (2, 3, "a")]


def test_an_error_of_a_rank_is_told_and_ends_those_that_wait_for_it() -> None:
    with pytest.raises(RankError, match=r"rank 1:\n(.*\n)*.*KeyError: 'only here'"):
        run_ranks(fail_on_rank_1, 2)


def test_ranks_that_take_too_long_are_killed() -> None:
    with pytest.raises(RankError, match=r"ranks \[0.*\] were still running after 3 s"):
        run_ranks(wait_for_ever, 2, timeout_s=3)
    assert not multiprocessing.active_children()
