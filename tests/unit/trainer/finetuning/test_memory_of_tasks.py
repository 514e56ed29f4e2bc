"""The memory estimates of objectives: what a step takes, or somewhat more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.support.peaks import peak_of
from tests.support.runs import tiny_config
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.batch import IGNORE
from trainer.finetuning import distillation, preference
from trainer.finetuning.distillation import distillation_sums
from trainer.finetuning.encoder import Encoder
from trainer.finetuning.task import LANGUAGE, Task
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model, num_weights
from trainer.model.forward import PassInputs
from trainer.model.memory_estimate import MemoryEstimate
from trainer.training.micro_batch_size import expected_memory

VOCAB, LENGTH, ROWS = 4096, 128, 2
MODEL = {"layers": 3, "width": 96, "heads": 3, "kv_heads": 3, "context": LENGTH}
LARGE = {"layers": 4, "width": 160, "heads": 5, "kv_heads": 5, "context": LENGTH}


def context_of(config: TrainConfig, vocab_size: int = VOCAB, length: int = LENGTH) -> RunContext:
    manifest = SimpleNamespace(vocab_size=vocab_size, row_length=length)
    group = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    return RunContext(config, cast("Any", manifest), cast("Any", group), "sdpa")


def config_of(tmp_path: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": MODEL,
        "batch": {"global_batch_size": 2 * ROWS, "micro_batch_size": ROWS},
        "loss": {"chunk_tokens": 64},
    }
    return tiny_config(tmp_path / "data", tmp_path / "run", **settings | changes)


def random_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def two_steps(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_an_estimate_of_distillation_has_the_teacher_and_is_what_a_step_takes_or_somewhat_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, objective="distillation", teacher=tmp_path / "teacher")
    large = config_of(tmp_path, model=LARGE).model
    teacher_run = SimpleNamespace(config=SimpleNamespace(model=large))
    monkeypatch.setattr(distillation, "SavedRun", lambda run: {tmp_path / "teacher": teacher_run}[run])
    monkeypatch.setattr(distillation, "default_chunk_tokens", lambda _size, _device="cpu": 64)
    found = expected_memory(context_of(config), ROWS, distillation.KIND.make(config, {}))
    plain = expected_memory(context_of(config), ROWS, LANGUAGE)
    assert found.frozen == 4 * num_weights(large, VOCAB)
    assert (found.weights, found.gradients, found.optimizer) == (plain.weights, plain.gradients, plain.optimizer)
    layout = make_layout(torch.zeros(ROWS, LENGTH, dtype=torch.int32), torch.arange(LENGTH).expand(ROWS, LENGTH))
    inputs = PassInputs(random_tokens(), layout, random_tokens(), None)

    def step() -> None:
        teacher = build_model(large, VOCAB, seed=1).eval().requires_grad_(requires_grad=False)
        settings: dict[str, Any] = {"teacher": teacher, "vocab_size": VOCAB, "loss": config.loss, "settings": config.distillation}
        two_steps(build_model(config.model, VOCAB, seed=0), lambda model: distillation_sums(model, inputs, **settings)[0])

    measured = peak_of(step)
    assert 0.7 <= measured / found.total <= 1.0, (measured, found)
    assert measured > plain.total, "without the teacher the estimate would be too low"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_an_estimate_of_preference_has_the_whole_reference(tmp_path: Path, parallel: str) -> None:
    config = config_of(tmp_path, objective="preference", parallel=parallel, lora={"rank": 2})
    found, plain = (expected_memory(context_of(config), ROWS, one) for one in (preference.KIND.make(config, {}), LANGUAGE))
    assert found.frozen == 4 * num_weights(config.model, VOCAB)
    assert found.total == plain.total + found.frozen
    assert "frozen" in found.describe()
    assert "frozen" not in plain.describe()


def test_an_estimate_of_preference_is_what_a_step_takes_or_somewhat_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference, "default_chunk_tokens", lambda _size, _device="cpu": 64)
    config = config_of(tmp_path, objective="preference")
    objective = preference.KIND.make(config, {})
    found = expected_memory(context_of(config), ROWS, objective)
    half = LENGTH // 2
    segments_BL = (torch.arange(LENGTH) // half).int().expand(ROWS, LENGTH).contiguous()
    layout = make_layout(segments_BL, (torch.arange(LENGTH) % half).expand(ROWS, LENGTH).contiguous())
    targets_BL = torch.full((ROWS, LENGTH), IGNORE)
    targets_BL[:, 8] = 1  # the last token of a prompt
    inputs = PassInputs(random_tokens(), layout, targets_BL, None)

    def loss(model: nn.Module) -> Tensor:
        assert objective.sums is not None
        return objective.sums(torch.device("cpu"))(model, inputs)[0]

    def step() -> None:
        assert objective.reference is not None
        objective.reference(build_model(config.model, VOCAB, seed=1))
        two_steps(build_model(config.model, VOCAB, seed=0), loss)

    share = peak_of(step) / found.total
    assert 0.7 <= share <= 1.0, found


ENCODER = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 1000}


def encoder_of(facts: bytes) -> Encoder:
    return Encoder({"encoder.json": facts}, 3, "mean", None)


def encoder_estimate(tmp_path: Path, facts: bytes, num_rows: int) -> MemoryEstimate:
    config = config_of(tmp_path, objective="classification")

    def corrected(estimate: MemoryEstimate, context: RunContext) -> MemoryEstimate:
        return encoder_of(facts).memory(estimate, context)

    return expected_memory(context_of(config), num_rows, Task(memory=corrected))


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("num_rows", [1, 4])
def test_an_estimate_of_an_encoder_is_what_a_step_takes_or_somewhat_more(tmp_path: Path, kind: str, num_rows: int) -> None:
    facts = json.dumps({"model_type": kind, "max_position_embeddings": LENGTH + 2, "pad_token_id": 1} | ENCODER).encode()
    found = encoder_estimate(tmp_path, facts, num_rows)
    assert found.weights == found.gradients == 4 * encoder_of(facts).num_weights(config_of(tmp_path).model, VOCAB)
    assert found.optimizer == 2 * found.weights
    tokens = torch.full((num_rows, LENGTH), 7)
    layout = make_layout(torch.zeros_like(tokens, dtype=torch.int32), torch.arange(LENGTH).expand(num_rows, LENGTH))

    def step() -> None:
        model = encoder_of(facts).build(0).train()
        two_steps(model, lambda one: one(tokens, layout).square().sum())

    share = peak_of(step) / found.total
    assert 0.7 <= share <= 1.0, found
