import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from common.errors import PreparedDataError
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import RowBatch
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.batch import DataFault, GlobalBatch, MicroBatch, micro_batch
from trainer.distributed.group import Group
from trainer.extensions.hooks import Extension
from trainer.health.guard import Thresholds
from trainer.model.attention import Layout, make_layout
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule, forward_pass
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import build_optimizers, optimizer_tensors
from trainer.parallel.wrapping import wrap_for_training
from trainer.training.step import PendingStep, StepInputs, StepResults, train_step
from trainer.training.trainable import Trainable, make_scaler

LENGTH, VOCAB = 32, 60
ALONE = Group(0, 1, 0, torch.device("cpu"))


def settings(**changes: Any) -> TrainConfig:
    return tiny_config(Path("data"), Path("run"), **changes)


def training_module(config: TrainConfig) -> Trainable:
    model = build_model(config.model, VOCAB, seed=1)
    loss = LossModule(model, config.loss)
    context = RunContext(config, cast(Manifest, SimpleNamespace(row_length=LENGTH)), ALONE, "sdpa")
    module, accumulation = wrap_for_training(loss, context)
    optimizers = build_optimizers(model, config.optim)
    return Trainable(context, Extension(), loss, module, accumulation, make_scaler(context), optimizers)


def batch(config: TrainConfig, seed: int = 0) -> GlobalBatch:
    """Rows of two documents and some padding, cut into micro-batches as the settings say."""
    generator = np.random.default_rng(seed)
    rows = config.batch.global_batch_size
    tokens = generator.integers(0, VOCAB, (rows, LENGTH), dtype=np.uint16)
    ends = np.sort(generator.integers(2, LENGTH, (rows, 2)), axis=1)
    place = np.arange(LENGTH)
    segments = np.where(place < ends[:, :1], 0, np.where(place < ends[:, 1:], 1, -1)).astype(np.int32)
    weighted = config.loss.reduction == "sequences"
    size = config.batch.micro_rows
    micro_batches = [
        micro_batch(RowBatch(tokens[first : first + size], segments[first : first + size]), with_weights=weighted)
        for first in range(0, rows, size)
    ]
    targets = sum(int((micro.targets >= 0).sum()) for micro in micro_batches)
    pieces = sum(float(micro.weights.sum()) for micro in micro_batches if micro.weights is not None)
    normaliser = round(pieces) if weighted else targets
    return GlobalBatch(0, np.arange(rows), targets, normaliser, tuple(micro_batches), len(micro_batches))


def step(training: Trainable, config: TrainConfig, number: int = 1) -> PendingStep:
    return train_step(training, batch(config), StepInputs(number))


@pytest.mark.parametrize("normalise", ["tokens", "sequences"])
@pytest.mark.parametrize("reproducibility", ["run", "elastic"])
def test_neither_loss_nor_gradient_depends_on_the_micro_batches(normalise: str, reproducibility: str) -> None:
    found = []
    for micro in (1, 4, 16):
        config = settings(
            batch={"global_batch_size": 16, "micro_batch_size": micro},
            loss={"reduction": normalise},
            optim={"clip_norm": 1e6},
            reproducibility=reproducibility,
        )
        training = training_module(config)
        result = step(training, config).result()
        found.append(
            (result.loss, result.grad_norm, [torch.as_tensor(parameter.grad).clone() for parameter in training.parameters.values()])
        )
    for loss, norm, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-6)
        for gradient, expected in zip(gradients, found[0][2], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_loss_of_sequences_is_the_mean_of_their_means() -> None:
    config = settings(batch={"global_batch_size": 4, "micro_batch_size": 4}, loss={"reduction": "sequences"})
    training = training_module(config)
    given = batch(config)
    [micro] = given.micro_batches
    with torch.no_grad():
        from_rows = []
        for row in range(4):
            one = RowBatch(micro.tokens[row : row + 1].numpy().astype(np.uint16), micro.segments[row : row + 1].numpy())
            for document in range(2):
                only = micro_batch(one)
                targets = torch.where(only.segments == document, only.targets, -100)
                if (count := int((targets >= 0).sum())) == 0:
                    continue
                from_rows.append(training.loss(only.tokens, layout_of(only), targets).item() / count)
    assert step(training, config).result().loss == pytest.approx(np.mean(from_rows), rel=1e-6)


def layout_of(micro: MicroBatch) -> Layout:
    return make_layout(micro.segments, micro.positions)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, precision: str) -> None:
    config = settings(optim={"kind": kind}, precision=precision)
    training = training_module(config)
    step(training, config).result()
    before = state(training)
    training.loss.custom_loss = lambda logits, targets, weights: logits.float().sum() * math.inf
    pending = step(training, config, number=2)
    assert pending.skip.item() == 1
    assert all(torch.equal(now, then) for now, then in zip(state(training), before, strict=True))
    assert not math.isfinite(pending.result().grad_norm)


@pytest.mark.parametrize(
    "limits", [Thresholds(skip_norm_above=1e-3), Thresholds(skip_norm_below=1e3), Thresholds(skip_loss_above=1.0)]
)
def test_a_step_beyond_its_limits_changes_nothing(limits: Thresholds) -> None:
    config = settings()
    training = training_module(config)
    before = state(training)
    pending = train_step(training, batch(config), StepInputs(1, thresholds=limits))
    assert pending.skip.item() == 1
    assert all(torch.equal(now, then) for now, then in zip(state(training), before, strict=True))


def state(training: Trainable) -> list[torch.Tensor]:
    weights = parameters_by_name(training.loss.model).values()
    moments = optimizer_tensors(training.loss.model, training.optimizers).values()
    return [tensor.detach().clone() for tensor in (*weights, *moments)]


def test_results_are_read_in_order_and_as_late_as_wanted() -> None:
    config = settings()
    training = training_module(config)
    late: StepResults[str] = StepResults(lag=2)
    seen: list[tuple[int, str]] = []
    for number in range(1, 6):
        late.add(step(training, config, number), f"step {number}")
        seen += [(result.step, facts) for result, facts in late.due()]
        assert len(seen) == max(0, number - 2)
    seen += [(result.step, facts) for result, facts in late.due(everything=True)]
    assert seen == [(number, f"step {number}") for number in range(1, 6)]
    assert not list(late.due(everything=True))


def test_what_the_device_decided_is_what_is_reported() -> None:
    config = settings()
    training = training_module(config)
    assert step(training, config).result().applied
    given = batch(config)
    withheld = train_step(training, given, StepInputs(2, thresholds=Thresholds(skip_norm_above=1e-3))).result()
    assert (withheld.applied, withheld.void) == (False, False)


def test_a_step_without_its_data_is_void_and_so_is_one_that_is_under_way_after_it() -> None:
    config = settings(precision="fp16")
    training = training_module(config)
    step(training, config).result()
    before, scaler = state(training), training.scaler.state_dict()
    lost = replace(batch(config), fault=DataFault("train/a.arrow", PreparedDataError("damaged")))
    first = train_step(training, lost, StepInputs(2))
    second = train_step(training, batch(config), StepInputs(3), previous=first)
    assert first.result().void
    assert first.result().fault == lost.fault
    assert (first.result().data_votes, first.result().memory_votes, first.result().applied) == (1, 0, False)
    assert (second.result().void, second.result().applied) == (False, False)
    assert all(torch.equal(now, then) for now, then in zip(state(training), before, strict=True))
    assert training.scaler.state_dict() == scaler


def test_rows_for_which_an_evaluation_lacks_memory_are_cut_as_often_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(batch={"global_batch_size": 8, "micro_batch_size": 8})
    loss, rows = training_module(config).loss, batch(config).micro_batches[0]
    with torch.no_grad():
        whole = forward_pass(loss, rows, config, ALONE.device, "sdpa", by_row=True)
        hidden, sizes = loss.model.hidden, []

        def narrow(tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
            sizes.append(len(tokens))
            if len(tokens) > 2:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
            return hidden(tokens, layout)

        monkeypatch.setattr(loss.model, "hidden", narrow)
        assert torch.equal(forward_pass(loss, rows, config, ALONE.device, "sdpa", by_row=True), whole)
        assert sizes == [8, 4, 2, 2, 2, 2]
        forward_pass(loss, rows, config, ALONE.device, "sdpa", by_row=True)
    assert sizes[6:] == [2, 2, 2, 2]


def test_a_single_row_for_which_an_evaluation_lacks_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(batch={"global_batch_size": 2, "micro_batch_size": 2})
    loss, rows = training_module(config).loss, batch(config).micro_batches[0]

    def nothing(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(loss.model, "hidden", nothing)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        forward_pass(loss, rows, config, ALONE.device, "sdpa", by_row=True)
