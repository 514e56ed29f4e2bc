"""The loss of preference pairs, compared with its formula, and rows that do not consist of pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from common.errors import CheckpointError, ConfigError, PreparedDataError
from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from tests.support.pairs import pair_records, write_pairs
from tests.support.prepared import write_prepared
from tests.support.runs import tiny_config
from trainer.checkpoint.of_run import weights_digest
from trainer.config import ModelConfig
from trainer.data.batch import IGNORE, MicroBatch, micro_batch
from trainer.finetuning.initial_weights import read_reference, write_reference
from trainer.finetuning.preference import KIND, PairRows, log_odds, pair_losses
from trainer.finetuning.task import Task, make_task
from trainer.model.attention import make_layout
from trainer.model.decoder import Decoder, build_model
from trainer.model.forward import PassInputs

MODEL = ModelConfig(layers=1, width=16, heads=2, kv_heads=1, context=256)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def rows_of(pairs: Path, cls: type[Rows] = PairRows) -> Rows:
    return cls(pairs, read_manifest(pairs), "train")


def inputs_of(batch: MicroBatch) -> PassInputs:
    return PassInputs(batch.tokens, make_layout(batch.segments, batch.positions), batch.targets, None)


def model_with(seed: int) -> Decoder:
    return build_model(MODEL, 262, seed)


def objective_with(tmp_path: Path, **settings: Any) -> Task:
    return KIND.make(tiny_config(tmp_path, tmp_path, preference=settings), {})


def answer_log_probabilities(model: Decoder, tokens: Tensor, prompt: int) -> Tensor:
    """Return the log probability of each token after the prompt, from whole logits of one sequence alone."""
    layout = make_layout(torch.zeros_like(tokens)[None], torch.arange(len(tokens))[None])
    log_probabilities = functional.log_softmax(model(tokens[None], layout)[0].float(), -1)
    return log_probabilities[torch.arange(prompt - 1, len(tokens) - 1), tokens[prompt:]]


def answers_of(batch: RowBatch) -> Iterator[tuple[tuple[Tensor, int], tuple[Tensor, int]]]:
    """Yield the better and the worse sequence of each pair, with the length of the prompt."""
    assert batch.has_loss_BL is not None
    for tokens_L, segments_L, has_loss_L in zip(batch.tokens_BL, batch.segments_BL, batch.has_loss_BL, strict=True):
        for pair in range((int(segments_L.max()) + 1) // 2):
            better, worse = (
                (torch.from_numpy(tokens_L[here].astype(np.int64)), int((~has_loss_L[here]).sum()))
                for here in (segments_L == 2 * pair, segments_L == 2 * pair + 1)
            )
            yield better, worse


def expected_dpo(batch: RowBatch, model: Decoder, reference: Decoder, beta: float, label_smoothing: float) -> tuple[Tensor, Tensor]:
    def ratio(tokens: Tensor, prompt: int) -> Tensor:
        own, initial = (answer_log_probabilities(one, tokens, prompt).sum() for one in (model, reference))
        return own - initial.detach()

    margins = torch.stack([beta * (ratio(*better) - ratio(*worse)) for better, worse in answers_of(batch)])
    won, lost = functional.logsigmoid(margins), functional.logsigmoid(-margins)
    return -(1 - label_smoothing) * won - label_smoothing * lost, margins


def expected_orpo(batch: RowBatch, model: Decoder, odds_weight: float) -> tuple[Tensor, Tensor]:
    losses, margins = [], []
    for better, worse in answers_of(batch):
        chosen, rejected = (answer_log_probabilities(model, *one).double().mean().exp() for one in (better, worse))
        ratio = chosen / (1 - chosen) / (rejected / (1 - rejected))
        margins.append(ratio.log())
        losses.append(-chosen.log() + odds_weight * (1 + 1 / ratio).log())
    return torch.stack(losses).float(), torch.stack(margins).float()


@pytest.mark.parametrize(
    "settings", [{"beta": 0.5}, {"beta": 0.5, "label_smoothing": 0.2}, {"loss": "orpo", "odds_weight": 0.7}], ids=str
)
def test_loss_and_gradient_are_those_of_the_formula(pairs: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    rows = rows_of(pairs)
    batch = rows.read(np.arange(3))
    objective = objective_with(tmp_path, **settings)
    model, reference = model_with(1), model_with(2)
    assert (objective.reference is None) == ("loss" in settings)
    assert objective.sums is not None
    if objective.reference is not None:
        objective.reference(reference)
    sums = objective.sums(torch.device("cpu"))(model, inputs_of(micro_batch(batch)))
    sums[0].backward()  # type: ignore[no-untyped-call]
    sums = sums.detach()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    if "loss" in settings:
        expected, margins = expected_orpo(batch, model, settings["odds_weight"])
    else:
        expected, margins = expected_dpo(batch, model, reference, 0.5, settings.get("label_smoothing", 0.0))
    expected.sum().backward()  # type: ignore[no-untyped-call]
    assert len(margins) == int(rows.num_targets(np.arange(3)).sum()) > 3
    torch.testing.assert_close(sums[0], expected.sum(), rtol=1e-5, atol=1e-5)
    assert sums[1] == (margins > 0).sum()
    torch.testing.assert_close(sums[2], margins.sum(), rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_the_score_of_a_row_has_the_same_bits_in_any_batch(pairs: Path, tmp_path: Path, loss: str) -> None:
    objective = objective_with(tmp_path, loss=loss)
    model = model_with(1)
    assert objective.measures is not None
    if objective.reference is not None:
        objective.reference(model_with(2))
    batch = rows_of(pairs).read(np.arange(3))
    with torch.no_grad():
        together = objective.measures.score(model, inputs_of(micro_batch(batch)))
        is_target = micro_batch(batch).targets != IGNORE
        for row in range(3):
            parts = {name: value[row : row + 1] for name, value in vars(batch).items() if value is not None}
            alone = objective.measures.score(model, inputs_of(micro_batch(RowBatch(**parts))))
            assert torch.equal(alone[is_target[row : row + 1]], together[row][is_target[row]])


def test_a_model_that_equals_its_reference_has_a_margin_of_zero(pairs: Path, tmp_path: Path) -> None:
    objective = objective_with(tmp_path)
    assert objective.reference is not None
    assert objective.measures is not None
    objective.reference(model_with(1))
    batch = micro_batch(rows_of(pairs).read(np.arange(2)))
    with torch.no_grad():
        scores = objective.measures.score(model_with(1), inputs_of(batch))
    found = scores[batch.targets != IGNORE]
    assert found[:, 1].tolist() == [0.0] * len(found)
    assert found[:, 0].tolist() == pytest.approx([math.log(2)] * len(found), abs=1e-6)


def test_a_large_margin_has_no_loss_and_a_negative_one_a_large_loss() -> None:
    losses = pair_losses(torch.tensor([100.0, -100.0]), 0.0)
    assert losses.tolist() == pytest.approx([0.0, 100.0])


def test_answers_that_are_certain_or_impossible_have_finite_odds_and_gradients() -> None:
    logs = torch.tensor([0.0, -1e-9, math.log(0.5), -50.0, -1e4], requires_grad=True)
    odds = log_odds(logs)
    assert odds.tolist() == pytest.approx([math.log(1e6), math.log(1e6), 0.0, -50.0, -1e4], abs=1e-4)
    odds.sum().backward()  # type: ignore[no-untyped-call]
    assert logs.grad is not None
    assert logs.grad.tolist() == pytest.approx([0.0, 0.0, 2.0, 1.0, 1.0])


def test_each_pair_has_one_target_the_first_token_of_its_better_answer(pairs: Path) -> None:
    rows, manifest = rows_of(pairs), read_manifest(pairs)
    val = PairRows(pairs, manifest, "val")
    numbers, of_val = np.arange(len(rows)), np.arange(len(val))
    assert int(rows.num_targets(numbers).sum()) + int(val.num_targets(of_val).sum()) == 60
    targets = rows.read(numbers).targets_BL
    assert targets is not None
    assert ((targets != IGNORE).sum(axis=1) == rows.num_targets(numbers)).all()
    first_bytes = {one["chosen"].encode()[0] + 4 for one in pair_records(60)}
    assert set(targets[targets != IGNORE].tolist()) <= first_bytes


def test_both_answers_of_a_pair_are_neighbours_in_a_row(pairs: Path) -> None:
    rows = rows_of(pairs)
    for number in range(len(rows)):
        ids = rows.document_ids(number)
        assert len(ids) % 2 == 0
        assert (ids[::2] == ids[1::2]).all()
        assert len(set(ids.tolist())) == len(ids) // 2


@pytest.mark.parametrize("damage", ["no-mask", "no-answer", "shifted", "odd"])
def test_rows_that_do_not_consist_of_pairs_are_refused(pairs: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    batch = rows_of(pairs, Rows).read(np.arange(2))
    assert batch.has_loss_BL is not None
    segments = batch.segments_BL.copy()
    has_loss: np.ndarray | None = batch.has_loss_BL.copy()
    if damage == "no-mask":
        has_loss = None
    elif damage == "no-answer":
        has_loss[segments == 1] = False  # type: ignore[index]
    elif damage == "shifted":
        has_loss[0, np.flatnonzero(has_loss[0])[0]] = False  # type: ignore[index]
    else:
        segments[segments == segments[0].max()] = -1
    monkeypatch.setattr(Rows, "read", lambda _self, _indices: replace(batch, segments_BL=segments, has_loss_BL=has_loss))
    with pytest.raises(PreparedDataError, match="prepare the data again"):
        rows_of(pairs).read(np.arange(2))


def test_data_and_objective_must_fit(pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would train on the worse answers too"):
        make_task(tiny_config(pairs, tmp_path / "run"), read_manifest(pairs), {})
    with pytest.raises(
        ConfigError, match=r"init is not set; name a run whose .* prompts: --init RUN, or use preference\.loss = orpo"
    ):
        make_task(tiny_config(pairs, tmp_path / "run", objective="preference"), read_manifest(pairs), {})
    plain = write_prepared(tmp_path / "plain")
    with pytest.raises(ConfigError, match="it has no preference pairs, which objective = preference needs"):
        make_task(tiny_config(plain, tmp_path / "run", objective="preference"), read_manifest(plain), {})


def test_the_file_of_the_reference_is_checked(tmp_path: Path) -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1)}
    write_reference(tmp_path, weights)
    found = read_reference(tmp_path, weights_digest(weights))
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    path = tmp_path / "objective" / "reference.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="the run began with"):
        read_reference(tmp_path, weights_digest(weights))
    path.write_bytes(data[:20])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_reference(tmp_path, weights_digest(weights))
    path.unlink()
    with pytest.raises(CheckpointError, match="are missing"):
        read_reference(tmp_path, weights_digest(weights))
    (tmp_path / "other").write_bytes(data)
    path.symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_reference(tmp_path, weights_digest(weights))
