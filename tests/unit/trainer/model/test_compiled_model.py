"""The compiled forward and backward pass is one graph, for each attention backend and each mode of checkpointing.

The kernel of `varlen` is CUDA's alone, so on a CPU an operator that computes the same takes its place.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from data_pipeline.dataset.shards import RowBatch
from tests.support.runs import tiny_config
from trainer.config import LossConfig, ModelConfig
from trainer.data.batch import MicroBatch, micro_batch
from trainer.model import attention
from trainer.model.attention import Backend, document_mask
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule, forward_pass

Checkpointing = Literal["none", "selective", "full"]
LENGTH, VOCAB = 32, 60
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces


@torch.library.custom_op("trainer_tests::varlen", mutates_args=())
def varlen(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor) -> Tensor:
    q_KGTH, weights_KGTS = _weights(q_TNH, k_TKH, bounds_M)
    return _heads_last(torch.einsum("kgts,skh->kgth", weights_KGTS, v_TKH), q_KGTH.shape[2])


@torch.library.custom_op("trainer_tests::varlen_backward", mutates_args=())
def varlen_backward(
    grad_TNH: Tensor, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q_KGTH, weights_KGTS = _weights(q_TNH, k_TKH, bounds_M)
    grad_KGTH = _groups(grad_TNH, k_TKH.shape[1])
    grad_weights = torch.einsum("kgth,skh->kgts", grad_KGTH, v_TKH)
    grad_scores = weights_KGTS * (grad_weights - (grad_weights * weights_KGTS).sum(-1, keepdim=True)) / q_TNH.shape[-1] ** 0.5
    return (
        _heads_last(torch.einsum("kgts,skh->kgth", grad_scores, k_TKH), len(q_TNH)),
        torch.einsum("kgts,kgth->skh", grad_scores, q_KGTH).contiguous(),
        torch.einsum("kgts,kgth->skh", weights_KGTS, grad_KGTH).contiguous(),
    )


def _groups(x_TNH: Tensor, num_kv_heads: int) -> Tensor:
    return x_TNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _heads_last(x_KGTH: Tensor, num_tokens: int) -> Tensor:
    return x_KGTH.permute(2, 0, 1, 3).reshape(num_tokens, -1, x_KGTH.shape[-1]).contiguous()


def _weights(q_TNH: Tensor, k_TKH: Tensor, bounds_M: Tensor) -> tuple[Tensor, Tensor]:
    """Queries by group, and the softmax over the earlier tokens of the same document."""
    documents_T = torch.searchsorted(bounds_M.long(), torch.arange(len(q_TNH)), right=True)
    q_KGTH = _groups(q_TNH, k_TKH.shape[1])
    scores = torch.einsum("kgth,skh->kgts", q_KGTH, k_TKH) / q_TNH.shape[-1] ** 0.5
    return q_KGTH, scores.masked_fill(~document_mask(documents_T[None])[0, 0], float("-inf")).softmax(-1)


@varlen.register_fake
def _(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, bounds_M: Tensor) -> Tensor:
    return torch.empty_like(q_TNH)


@varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *varlen_backward(grad, *ctx.saved_tensors), None


varlen.register_autograd(_backward, setup_context=_save)


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(attention, "_varlen_attention", lambda: lambda q, k, v, bounds, _: varlen(q, k, v, bounds))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_module(checkpointing: Checkpointing, **shares: float) -> LossModule:
    config = ModelConfig(layers=3, width=64, heads=4, kv_heads=2, context=LENGTH, activation_checkpointing=checkpointing, **shares)
    return LossModule(build_model(config, VOCAB, seed=1), LossConfig())


def rows_of(documents: list[int]) -> MicroBatch:
    """Two rows of documents of these lengths; what is left of a row is padding."""
    number = np.repeat([*range(len(documents)), -1], [*documents, LENGTH - sum(documents)]).astype(np.int32)
    tokens = np.arange(2 * LENGTH, dtype=np.uint16).reshape(2, LENGTH) % VOCAB
    return micro_batch(RowBatch(tokens, np.stack([number, number])), with_bounds=True)


def passes(module: torch.nn.Module, documents: list[int], backend: Backend) -> None:
    """Forward and backward, as a training step does them."""
    config = tiny_config(Path("data"), Path("run")).model_copy(update={"model": getattr(module, "_orig_mod", module).model.config})
    forward_pass(module, rows_of(documents), config, torch.device("cpu"), backend).backward()


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_a_compiled_pass_is_one_graph_with_the_gradients_of_the_plain_one(backend: Backend, checkpointing: Checkpointing) -> None:
    module = loss_module(checkpointing)
    passes(module, [5, 12, 9], backend)
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    passes(torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True), [5, 12, 9], backend)
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], plain)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_compiled_pass_drops_what_the_plain_one_drops(checkpointing: Checkpointing) -> None:
    module = loss_module(checkpointing, attention_dropout=0.2, residual_dropout=0.2, embedding_dropout=0.2)
    passes(module, [5, 12, 9], "sdpa")
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    passes(torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True), [5, 12, 9], "sdpa")
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], plain)


def test_batches_with_other_numbers_of_documents_do_not_compile_the_model_again() -> None:
    compiled = torch.compile(loss_module("none"), backend="aot_eager", dynamic=False, fullgraph=True)
    passes(compiled, [5, 12, 9], "varlen")
    assert len({len(rows_of([1] * number).bounds) for number in range(1, 21)}) > 1, "the case has bounds of several lengths"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(1, 21):
            passes(compiled, [1] * number, "varlen")
