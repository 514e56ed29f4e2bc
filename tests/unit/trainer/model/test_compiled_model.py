"""The compiled forward and backward pass is one graph, for each attention backend and each mode of checkpointing.

The kernel of `varlen` needs a GPU, so on a CPU an operator that computes the same takes its place. `flex` has a gradient on a CPU
only if the graph is not compiled further, as here.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast, get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.nn.attention import flex_attention

from data_pipeline.dataset.shards import RowBatch
from tests.support.devices import CUDA
from tests.support.runs import tiny_config
from tests.support.varlen import use_varlen_on_cpu
from trainer.config import LossConfig, ModelConfig
from trainer.data.batch import MicroBatch, micro_batch
from trainer.model.attention import Backend
from trainer.model.decoder import Decoder, build_model
from trainer.model.forward import LossModule, forward_pass

Checkpointing = Literal["none", "selective", "full"]
MODES = get_args(Checkpointing)
LENGTH, VOCAB = 128, 60
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch's own, while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # the same
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


@pytest.fixture(autouse=True)
def fresh_compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "device" not in request.fixturenames:  # on a CPU
        use_varlen_on_cpu(monkeypatch)
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_tensors: None)  # it refuses gradients on a CPU
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def loss_module(checkpointing: Checkpointing, **shares: float) -> LossModule:
    config = ModelConfig(layers=2, width=64, heads=4, kv_heads=2, context=LENGTH, activation_checkpointing=checkpointing, **shares)
    return LossModule(build_model(config, VOCAB, seed=1), LossConfig())


def rows_of(documents: list[int]) -> MicroBatch:
    """Two rows of documents of these lengths; what is left of a row is padding."""
    number = np.repeat([*range(len(documents)), -1], [*documents, LENGTH - sum(documents)]).astype(np.int32)
    tokens = np.arange(2 * LENGTH, dtype=np.uint16).reshape(2, LENGTH) % VOCAB
    return micro_batch(RowBatch(tokens, np.stack([number, number])), with_bounds=True)


def passes(module: torch.nn.Module, documents: list[int], backend: Backend, device: str = "cpu") -> None:
    """Forward and backward, as a training step does them."""
    config = tiny_config(Path("data"), Path("run"), compile="on", precision="fp32" if device == "cpu" else "bf16")
    config = config.model_copy(update={"model": getattr(module, "_orig_mod", module).model.config})
    forward_pass(module, rows_of(documents), config, torch.device(device), backend).backward()


@pytest.mark.parametrize(
    ("backend", "compiler", "checkpointing"),
    [
        *(("varlen", "aot_eager", how) for how in MODES),
        *(("flex", "eager", how) for how in MODES),
        *(("sdpa", "eager", how) for how in MODES),
        ("documents", "eager", "none"),  # a compiled run does not use it: see `choose_backend`
    ],
)
def test_a_compiled_pass_is_one_graph_with_the_gradients_of_the_plain_one(
    backend: Backend, compiler: str, checkpointing: Checkpointing
) -> None:
    module = loss_module(checkpointing)
    plain, compiled = (gradients(one, backend) for one in (module, as_one_graph(module, compiler)))
    torch.testing.assert_close(compiled, plain)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("checkpointing", MODES)
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa"])
def test_on_a_gpu_a_compiled_pass_is_one_graph_with_the_gradients_of_the_plain_one(
    backend: Backend, checkpointing: Checkpointing, device: str
) -> None:
    module = loss_module(checkpointing).to(device)
    plain, compiled = (gradients(one, backend, device) for one in (module, as_one_graph(module, "aot_eager")))
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02 * float(other.abs().max()))  # bf16


@pytest.mark.parametrize("device", [CUDA])
def test_on_a_gpu_the_generated_code_has_neither_a_scatter_nor_logits_in_fp32(device: str) -> None:
    config = ModelConfig(layers=1, width=64, heads=4, context=LENGTH)
    module = LossModule(build_model(config, 1000, seed=1), LossConfig()).to(device)
    _, codes = run_and_get_code(passes, torch.compile(module, dynamic=False), [5, 12, 9], "flex", device)
    code = "\n".join(codes)
    assert "loss_and_slopes_" in code
    assert "scatter" not in code
    assert re.search(rf"empty_strided_cuda\(\({2 * LENGTH}, {config.padded_vocab(1000)}\), .*torch.bfloat16", code)
    assert not re.search(rf"empty_strided_cuda\(\({2 * LENGTH}, {config.padded_vocab(1000)}\), .*torch.float32", code)


def as_one_graph(module: LossModule, compiler: str) -> torch.nn.Module:
    compiled: torch.nn.Module = torch.compile(module, backend=compiler, dynamic=False, fullgraph=True)  # type: ignore[assignment]
    return compiled


def gradients(module: torch.nn.Module, backend: Backend, device: str = "cpu") -> list[Tensor]:
    """Return the gradients of one pass, in the order of the parameters."""
    module.zero_grad(set_to_none=True)
    passes(module, [5, 12, 9], backend, device)
    return [cast(Tensor, parameter.grad) for parameter in module.parameters()]


@pytest.mark.parametrize("checkpointing", MODES)
def test_a_compiled_pass_drops_what_the_plain_one_drops(checkpointing: Checkpointing) -> None:
    module = loss_module(checkpointing, attention_dropout=0.2, residual_dropout=0.2, embedding_dropout=0.2)
    passes(module, [5, 12, 9], "sdpa")
    plain = [parameter.grad for parameter in module.parameters()]
    module.zero_grad(set_to_none=True)
    passes(torch.compile(module, backend="aot_eager", dynamic=False, fullgraph=True), [5, 12, 9], "sdpa")
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], plain)


@pytest.mark.parametrize("checkpointing", MODES)
def test_a_layer_that_is_compiled_separately_is_one_graph(checkpointing: Checkpointing) -> None:
    module, counter = loss_module(checkpointing), CompileCounter()
    assert isinstance(module.model, Decoder)
    for layer in module.model.model.layers:  # as under FSDP
        layer.compile(dynamic=False, backend=counter)
    for documents in ([5, 12, 9], [1] * 20):
        passes(module, documents, "varlen")
    assert counter.frame_count == 1, "all layers and all batches share the graph"
    assert not counters["graph_break"]


@pytest.mark.parametrize("backend", ["flex", "sdpa"])
def test_batches_with_other_documents_do_not_compile_the_model_again(backend: Backend) -> None:
    compiled = torch.compile(loss_module("none"), backend="eager", dynamic=False, fullgraph=True)
    passes(compiled, [5, 12, 9], backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in (1, 2, 7, 20):
            passes(compiled, [1] * number, backend)
