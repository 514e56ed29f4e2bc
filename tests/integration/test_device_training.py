"""Whole training runs on the CPU and, if there is one, on a GPU. The same properties hold on both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import RowBatch
from tests.support.devices import needs_gpu, on_each_device, waiting_is_an_error
from tests.support.prepared import write_prepared
from tests.support.runs import arguments, losses, metrics, run_command, tiny_config
from trainer import loop
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.batch import GlobalBatch, micro_batch
from trainer.distributed.group import Group
from trainer.extensions.hooks import Extension
from trainer.loop import train
from trainer.machine.determinism import configure_determinism
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.model.parameters import parameters_by_name
from trainer.optim.optimizers import build_optimizers
from trainer.parallel.accumulation import Accumulation, FsdpAccumulation
from trainer.parallel.fsdp import full_tensors, shard
from trainer.training.step import train_step
from trainer.training.step_report import StepInputs
from trainer.training.trainable import Trainable, make_scaler


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"), row_length=32)


def config_of(data: Path, run: Path, device: str, **changes: Any) -> TrainConfig:
    """Return a configuration with a head width that every backend accepts. On a GPU: bf16, so `auto` attention is `varlen`."""
    model = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "context": 32}
    usual = {"device": device, "compile": "off", "precision": "bf16" if device == "cuda" else "fp32", "model": model}
    return tiny_config(data, run, **(usual | changes))


def in_process_of_its_own(config: TrainConfig, cache: Path) -> str:
    """Train in a separate process with an empty cache of compiled kernels. Return the last line of its output."""
    done = run_command(
        "trainer", "train", *arguments(config), TORCHINDUCTOR_CACHE_DIR=str(cache), CUBLAS_WORKSPACE_CONFIG=":4096:8"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@on_each_device
def test_a_run_and_one_that_was_stopped_half_way_have_the_same_bits_with_cold_caches(
    data: Path, tmp_path: Path, device: str
) -> None:
    compiled = "on" if device == "cuda" else "off"  # compiling for a CPU is slow and not the default
    steps = {"schedule": {"warmup_steps": 3, "decay_steps": 20}, "compile": compiled}
    whole = config_of(data, tmp_path / "whole", device, limits={"steps": 20}, **steps)
    half = config_of(data, tmp_path / "halves", device, limits={"steps": 10}, **steps)
    rest = half.model_copy(update={"limits": whole.limits})
    in_process_of_its_own(half, tmp_path / "cache-1")
    assert in_process_of_its_own(rest, tmp_path / "cache-2") == in_process_of_its_own(whole, tmp_path / "cache-3")
    assert losses(rest.run) == losses(whole.run)
    assert len(losses(whole.run)) == 20


@on_each_device
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp16"},
        {"precision": "bf16", "ema": {"decay": 0.9}},
        {"parallel": "fsdp"},
        {"attention": "sdpa", "model": {"activation_checkpointing": "full"}},
        {"attention": "sdpa", "model": {"activation_checkpointing": "selective"}},
        {"reproducibility": "elastic", "batch": {"global_batch_size": 8, "micro_batch_size": 2}},
        {"optim": {"kind": "muon"}},
    ],
    ids=lambda changes: "-".join(str(value) for value in changes.values()),
)
def test_training_learns_and_gives_the_same_bits_twice_and_after_a_resume(
    data: Path, tmp_path: Path, device: str, changes: dict[str, Any]
) -> None:
    model = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "context": 32} | changes.get("model", {})
    changed = changes | {"model": model, "checkpoint": {"every_steps": 6}}
    whole = config_of(data, tmp_path / "whole", device, **changed)
    half = config_of(data, tmp_path / "halves", device, **changed, limits={"steps": 6})
    train(half)
    assert train(half.model_copy(update={"limits": whole.limits})) == train(whole)
    assert losses(half.run) == losses(whole.run)
    evaluations = metrics(whole.run, "eval")
    assert evaluations[-1]["val_loss"] < evaluations[0]["val_loss"]


class _Waits(TorchDispatchMode):
    """Counts on a CPU the operators that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default):
            self.found.append(str(function))
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    if device == "cuda":
        with waiting_is_an_error():
            yield
    else:
        with _Waits() as waits:
            yield
        assert not waits.found


@on_each_device
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("changes", [{}, {"loss": {"reduction": "sequences"}, "ema": {"decay": 0.9}}])
def test_a_step_never_makes_the_host_wait(
    data: Path, tmp_path: Path, device: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, watched = loop.train_step, []

    def watched_step(trainable: Any, batch: Any, inputs: Any, **settings: Any) -> Any:
        if inputs.step <= 2:  # the first steps initialize libraries
            return step(trainable, batch, inputs, **settings)
        watched.append(inputs.step)
        with no_waiting(device):
            return step(trainable, batch, inputs, **settings)

    monkeypatch.setattr(loop, "train_step", watched_step)
    train(config_of(data, tmp_path / "run", device, attention="auto" if device == "cuda" else "sdpa", **changes))
    assert watched == list(range(3, 13))


@on_each_device
def test_a_trained_model_writes_the_same_text_twice(data: Path, tmp_path: Path, device: str) -> None:
    config = config_of(data, tmp_path / "run", device)
    train(config)
    command = ("trainer", "generate", str(config.run), "--prompt", "ab", "--max_tokens", "20", "--seed", "3")
    first, second = run_command(*command), run_command(*command)
    assert first.returncode == 0, first.stderr
    assert first.stdout
    assert first.stdout == second.stdout


@contextmanager
def group_of_one_rank(device: str) -> Iterator[Group]:
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield Group(0, 1, 0, torch.device(device))
    finally:
        dist.destroy_process_group()


def weights_after_three_steps(config: TrainConfig, group: Group, *, sharded: bool) -> dict[str, torch.Tensor]:
    model = build_model(config.model, 256, seed=1).to(group.device)
    loss = LossModule(model, config.loss)
    whole = list(loss.parameters())
    module: Any = shard(loss, group) if sharded else loss
    accumulation = FsdpAccumulation(module, list(loss.parameters())) if sharded else Accumulation(whole)
    context = RunContext(config, cast(Manifest, SimpleNamespace(row_length=32)), group, "sdpa")
    optimizers = build_optimizers(model, config.optim)
    trainable = Trainable(context, Extension(), loss, module, accumulation, make_scaler(context), optimizers)
    tokens = np.random.default_rng(1).integers(0, 256, (4, 32), dtype=np.uint16)
    micro_batches = tuple(micro_batch(RowBatch(rows, np.zeros(rows.shape, np.int32))) for rows in np.split(tokens, 2))
    for step in range(1, 4):
        train_step(trainable, GlobalBatch(0, np.arange(4), 124, 124.0, micro_batches, 2), StepInputs(step))
    return full_tensors(parameters_by_name(model), group)


@on_each_device
def test_weights_that_are_sharded_on_one_rank_train_to_the_same_bits(data: Path, tmp_path: Path, device: str) -> None:
    config = config_of(data, tmp_path / "run", device)
    configure_determinism(config)
    with group_of_one_rank(device) as group:
        whole, sharded = (weights_after_three_steps(config, group, sharded=sharded) for sharded in (False, True))
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


LITTLE_MEMORY = """
import torch


def on_train_start(run):
    # What the process holds now, and room for micro-batches of a few rows.
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + {room}) / total)
"""


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_that_runs_out_of_memory_goes_on_with_smaller_micro_batches(data: Path, tmp_path: Path) -> None:
    extension = tmp_path / "little_memory.py"
    extension.write_text(LITTLE_MEMORY.format(room=40 << 20))
    wide = {"layers": 4, "width": 256, "heads": 4, "context": 32}
    rows = {"global_batch_size": 512, "micro_batch_size": 512}
    try:
        run = config_of(
            data, tmp_path / "run", "cuda", model=wide, batch=rows, extension=extension, eval={"every_steps": 100, "max_rows": 4}
        )
        line = train(run)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert line.endswith("steps 12")
    assert [event["step"] for event in metrics(run.run, "train")] == list(range(1, 13))
    assert "out_of_memory" in {event["rule"] for event in metrics(run.run, "alert")}
