"""A task: what a built-in kind of fine-tuning changes in the ordinary loop.

The loop, the step, checkpoints, the guard and resumes know no kinds of training. A task supplies only the parts that differ, and
each part has a default that changes nothing.

A kind of fine-tuning is a module of this folder with the name of its value of the setting `objective`. It has a `KIND`, and is read
only if a run asks for it.

Rules that keep a run reproducible: a part depends on settings, `files`, data and weights alone. It takes random numbers from the
global generator of torch, which is seeded for each micro-batch, or from `seed`. It adds no exchange between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.errors import CheckpointError, ConfigError
from common.files import digest_bytes
from common.untrusted import digest_run_file, read_run_file
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows
from trainer.config import ModelConfig, TrainConfig
from trainer.context import RunContext
from trainer.model.decoder import num_weights
from trainer.model.forward import EvalMetrics, LossFunction, PassInputs
from trainer.model.memory_estimate import MemoryEstimate
from trainer.runs.layout import TASK_FOLDER
from trainer.runs.saved_run import SavedRun

_MAX_FILE_BYTES = 64 << 20
_REPLACED = ("build_model", "loss", "training_step")


@dataclass(frozen=True)
class Task:
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Small files that the task needs besides settings and data, by name. The run keeps them in `objective/`, so a saved model
    can be loaded without their sources, and their digests belong to the run's identity. Put the digest of a large file into a
    small one."""
    rows: Callable[..., Rows] = Rows
    """Opens the rows of a split, with the arguments of `Rows`. A subclass of `Rows` may set `RowBatch.targets_BL`. Its
    `num_targets` must count these targets, because the loss is divided by their number in the global batch."""
    model: Callable[[ModelConfig, int, int], nn.Module] | None = None
    """`(model_config, vocab_size, seed)` returns the model on the CPU in fp32, with weights that depend on the arguments alone. Its
    `forward(tokens_BL, layout)` returns logits for `loss`, (B, L, …)."""
    num_weights: Callable[[ModelConfig, int], int] = num_weights
    """`(model_config, vocab_size)` returns the number of weights of `model`, without memory for them."""
    pretrained: Callable[[], Mapping[str, Tensor]] | None = None
    """Returns the weights by name with which a new training begins, on each rank. It may lack those of `fresh`. None: those of
    `model`. It is not called for a resume or a saved model."""
    flops: Callable[[ModelConfig, Manifest], float] | None = None
    """`(model_config, manifest)` returns the floating-point operations of forward and backward for each target; None: those of the
    decoder for a token."""
    fresh: frozenset[str] = frozenset()
    """Names of parameters that the decoder lacks, such as those of a head. `--init` leaves them as `model` made them."""
    dropped: frozenset[str] = frozenset()  # Names of the decoder's parameters that the model lacks. `--init` ignores them.
    loss: LossFunction | None = None
    """`(logits, targets_BL, weights_BL)` returns the sum of the loss over all targets, a fp32 scalar."""
    sums: Callable[[torch.device], Callable[[nn.Module, PassInputs], Tensor]] | None = None
    """Returns the function `(model, inputs)` of the forward pass in training, whose result is the sum of the losses, and behind it
    the sum of each number of `step_metrics`, (1 + K,) fp32. It is called with the device of the run before each pass."""
    step_metrics: tuple[str, ...] = ()
    """Names of the numbers besides the loss that `sums` measures. The event of a step has their means over the targets."""
    measures: EvalMetrics | None = None
    memory: Callable[[MemoryEstimate, RunContext], MemoryEstimate] | None = None
    """Returns the memory of one rank, from the estimate for the training of the decoder as a language model; None: the same."""
    reference: Callable[[nn.Module], None] | None = None
    """Takes a copy of the model with the weights that the run began with, on the device of the run, before the first pass. The run
    must begin with the weights of another run, and keeps them in its folder."""
    comparable: bool = True
    """Whether the training loss is the one that evaluations measure if the settings of `loss` are plain. If not, the alerts that
    compare both are off."""
    writes: bool = True  # Whether the model continues texts. If not, evaluations have no samples, and `generate` refuses the run.

    @property
    def predicts_tokens(self) -> bool:
        return self.rows is Rows

    @property
    def has_perplexity(self) -> bool:
        """Whether the training loss is the cross-entropy of tokens, so that `exp(loss)` is a perplexity."""
        return self.predicts_tokens and self.sums is None

    @property
    def digests(self) -> dict[str, str]:
        return {f"objective.{name}": digest_bytes(data) for name, data in sorted(self.files.items())}


LANGUAGE = Task()


class Kind(NamedTuple):
    gather: Callable[[TrainConfig, Manifest], Mapping[str, bytes]]
    make: Callable[[TrainConfig, Mapping[str, bytes]], Task]
    """Returns the task for these files. They may come from a stranger's run: check them, and raise CheckpointError."""


def kind_named(objective: str) -> Kind:
    if objective == "language":
        return Kind(lambda _config, _manifest: {}, lambda _config, _files: LANGUAGE)
    found: Kind = import_module(f"trainer.finetuning.{objective}").KIND
    return found


def make_task(config: TrainConfig, manifest: Manifest, hooks: Mapping[str, object]) -> Task:
    if manifest.has_pairs and config.objective != "preference":
        raise ConfigError(
            f"{config.data} has preference pairs, and objective = {config.objective} would train on the worse answers too; use "
            "--objective preference, or other data"
        )
    kind = kind_named(config.objective)
    files = MappingProxyType(dict(kind.gather(config, manifest)))
    task = kind.make(config, files)
    both = [name for name in _REPLACED if name in hooks]
    if both and task is not LANGUAGE:
        raise ConfigError(
            f"objective = {config.objective} brings its own model and loss, and the extension defines {', '.join(both)}; remove "
            "these functions from the extension, or use objective = language"
        )
    return replace(task, files=files)


def saved_task(run: SavedRun, config: TrainConfig) -> Task:
    recorded = run.record.files
    prefix = f"{TASK_FOLDER}/"
    files = {}
    for name in sorted(name for name in recorded if name.startswith(prefix)):
        if digest_run_file(run.path, name) != recorded[name]:
            raise CheckpointError(f"{run.path / name}: the file was changed; restore it from a copy")
        files[name.removeprefix(prefix)] = read_run_file(run.path / name, _MAX_FILE_BYTES, run.path)
    return replace(kind_named(config.objective).make(config, files), files=MappingProxyType(files))
