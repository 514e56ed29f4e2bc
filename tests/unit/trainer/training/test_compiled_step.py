"""A training step as a GPU makes it by default: compiled, bf16, `varlen` attention. On a CPU an operator replaces the kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import RowBatch
from tests.support.devices import on_each_device, waiting_is_an_error
from tests.support.runs import tiny_config
from tests.support.varlen import use_varlen_on_cpu
from trainer.context import RunContext
from trainer.data.batch import GlobalBatch, micro_batch
from trainer.distributed.group import Group
from trainer.extensions.hooks import Extension
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.optim.optimizers import build_optimizers
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.wrapping import wrap_for_training
from trainer.training.step import PendingStep, StepInputs, train_step
from trainer.training.trainable import Trainable, make_scaler

LENGTH, VOCAB, ROWS, MICRO = 320, 60, 4, 2
READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""Methods of a tensor that wait for a GPU."""
READING_OPERATORS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::unique"}
CPU_KERNEL = "aten::_fused_adamw_"
"""On a CPU it reads the counters of the steps. The kernel for GPUs does not."""
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces


@pytest.fixture
def compiler(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Count the graphs of compiled modules. A break of a graph is an error. On a CPU the graphs are not compiled further."""
    counter = CompileCounterWithBackend("inductor" if device == "cuda" else "eager")
    compile_module = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda self, **options: compile_module(self, **options, backend=counter, fullgraph=True)
    )
    if device == "cpu":
        use_varlen_on_cpu(monkeypatch)
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def trainable(device: str, **changes: Any) -> Trainable:
    usual = {
        "device": device,
        "compile": "on",
        "precision": "bf16",
        "model": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "context": LENGTH},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": MICRO},
    }
    config = tiny_config(Path("data"), Path("run"), **(usual | changes))
    decoder = build_model(config.model, VOCAB, seed=1).to(device)
    loss = LossModule(decoder, config.loss)
    manifest, group = cast(Manifest, SimpleNamespace(row_length=LENGTH)), Group(0, 1, 0, torch.device(device))
    context = RunContext(config, manifest, group, "varlen")
    module, accumulation = wrap_for_training(loss, context)
    average = None if config.ema.decay is None else WeightAverage(decoder, config.ema)
    optimizers = build_optimizers(decoder, config.optim)
    return Trainable(context, Extension(), loss, module, accumulation, make_scaler(context), optimizers, average)


def batch_of(num_documents: int, *, with_weights: bool = False) -> GlobalBatch:
    """Rows of this many documents, the last of which fills the row."""
    segments = np.minimum(np.arange(LENGTH, dtype=np.int32), num_documents - 1)
    tokens = np.arange(MICRO * LENGTH, dtype=np.uint16).reshape(MICRO, LENGTH) % VOCAB
    rows = RowBatch(tokens, np.stack([segments] * MICRO))
    micro_batches = tuple(micro_batch(rows, with_weights=with_weights, with_bounds=True) for _ in range(ROWS // MICRO))
    targets = sum(int((micro.targets >= 0).sum()) for micro in micro_batches)
    return GlobalBatch(0, np.arange(ROWS), targets, max(targets, 1), micro_batches, len(micro_batches))


@contextmanager
def reads_by_the_host() -> Iterator[list[str]]:
    """Collect the reads of tensors, by methods called in Python and by operators that PyTorch calls."""
    found: list[str] = []

    def noted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Tensor, *arguments: Any, **options: Any) -> Any:
            found.append(f"Tensor.{name}")
            return method(self, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch, profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in READS:
            patch.setattr(Tensor, name, noted(name, getattr(Tensor, name)))
        yield found
    found += [event.name for event in profiler.events() if event.name in READING_OPERATORS and not within(event, CPU_KERNEL)]


def within(event: Any, name: str) -> bool:
    parent = event.cpu_parent
    return parent is not None and (parent.name == name or within(parent, name))


@on_each_device
def test_twenty_batches_of_other_documents_are_computed_by_one_graph(device: str, compiler: CompileCounterWithBackend) -> None:
    training, lengths = trainable(device), set()
    for step, num_documents in enumerate([1, 2, 300, 7, *range(4, 320, 20)], start=1):
        batch = batch_of(num_documents)
        lengths |= {len(cast(Tensor, micro.bounds)) for micro in batch.micro_batches}
        train_step(training, batch, StepInputs(step))
    assert step == 20
    assert len(lengths) >= 5, "the case has bounds of several lengths"
    assert max(lengths) > 513
    assert compiler.frame_count == 1


@on_each_device
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own, while it traces
def test_layers_that_are_compiled_alone_have_one_graph_together(device: str, compiler: CompileCounterWithBackend) -> None:
    model = {"layers": 3, "width": 32, "heads": 2, "kv_heads": 1, "context": LENGTH}
    train_step(trainable(device, compile="layers", model=model), batch_of(3), StepInputs(1))
    assert compiler.frame_count == 1


@on_each_device
@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("changes", [{}, {"loss": {"reduction": "sequences"}, "ema": {"decay": 0.9}}, {"precision": "fp16"}])
def test_the_host_reads_nothing_that_the_device_computes_in_a_step(device: str, changes: dict[str, Any]) -> None:
    training = trainable(device, **changes)
    batches = [pinned(batch_of(number, with_weights="loss" in changes), device) for number in (3, 1, 40, 300)]

    def step(number: int, previous: PendingStep | None) -> PendingStep:
        pending = train_step(training, batches[number], StepInputs(number), previous=previous)
        if training.average is not None:
            training.average.update(number, pending.skip)
        return pending

    previous = step(1, step(0, None))  # the first steps compile the model and initialize libraries
    if device == "cuda":
        with waiting_is_an_error():
            step(3, step(2, previous))
        return
    with reads_by_the_host() as found:
        last = step(3, step(2, previous))
    assert not found
    with reads_by_the_host() as found:
        last.result()
    assert "Tensor.tolist" in found, "a read is found"


def pinned(batch: GlobalBatch, device: str) -> GlobalBatch:
    """Return the batch as the loader returns it."""
    return replace(batch, micro_batches=tuple(micro.pinned() for micro in batch.micro_batches)) if device == "cuda" else batch
