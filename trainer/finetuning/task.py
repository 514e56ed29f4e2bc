"""A task: what a built-in kind of fine-tuning changes in the ordinary loop.

The loop, the step, checkpoints, the guard and resumes know no kinds of training. A task supplies only the parts that differ,
and each part has a default that changes nothing:

    part        called by                                   default
    files       `trainer.training.start.plan`                none
    rows        `start.plan`, `evaluate`, `audit`           the packed rows, whose targets are the next tokens
    model       `trainer.training.trainable.new_model`      the decoder
    pretrained  `training.start.restore`                    new weights
    loss        `LossModule`, in training                   cross-entropy of the targets, with the settings of `loss`
    step        `trainer.training.step.accumulate`          one pass with `loss`, forward and backward
    measures    `LossModule` and `evaluate`                 cross-entropy of the targets
    memory      `micro_batch_size.expected_memory`          the estimate for the decoder

`trainer.finetuning.choice` has the kinds by name. A new kind needs a module here with two functions, `gather` and `make` (see
`Kind`), an entry in `KINDS`, its name in the type of the setting `objective`, and a section for its settings in `trainer.config`.

Rules that keep a run reproducible: a part depends on settings, `files`, data and weights alone. It takes random numbers from the
global generator of torch, which is seeded for each micro-batch, or from `seed`. It adds no exchange between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows
from trainer.config import ModelConfig, TrainConfig
from trainer.data.batch import MicroBatch
from trainer.model.decoder import num_weights
from trainer.model.forward import LossFunction
from trainer.model.memory_estimate import MemoryEstimate
from trainer.runs.context import RunContext
from trainer.runs.measures import Measures

__all__ = ["LANGUAGE", "TASK_FOLDER", "Kind", "Task", "Passes"]

TASK_FOLDER = "objective"
"""The folder in a run with the files of its task."""


class Passes(Protocol):
    """One micro-batch, as `trainer.training.micro_step.MicroStep` hands it to `Task.step`."""

    model: nn.Module
    config: TrainConfig
    rows: MicroBatch
    step: int
    number: int

    def loss_sum(self, *, draw: int | None = None) -> Tensor:
        """Return the ordinary loss, summed over the targets of the micro-batch."""

    def forward(self, function: Callable[..., Any], *tensors: Tensor, draw: int | None = None) -> Any:
        """Return `function(model, inputs, *tensors)`, computed in the module that is compiled and wrapped."""

    def backward(self, loss_sum: Tensor) -> None:
        """Add the gradient of a sum of losses."""


@dataclass(frozen=True)
class Task:
    """The parts of the loop that a kind of fine-tuning replaces."""

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
    dropped: frozenset[str] = frozenset()
    """Names of the decoder's parameters that the model lacks. `--init` ignores them."""
    loss: LossFunction | None = None
    """`(logits, targets_BL, weights_BL)` returns the sum of the loss over all targets, a fp32 scalar."""
    step: Callable[[Passes], Tensor] | None = None
    """Makes all passes over a micro-batch, backward too, and returns the sum of its losses without a gradient; with `step_metrics`
    a tensor of this sum and those of each measure."""
    step_metrics: tuple[str, ...] = ()
    """Names of the numbers besides the loss that `step` measures. The event of a step has their means over the targets."""
    measures: Measures | None = None
    """What an evaluation measures."""
    memory: Callable[[MemoryEstimate, RunContext], MemoryEstimate] | None = None
    """Returns the memory of one rank, from the estimate for the training of the decoder as a language model; None: the same."""
    reference: Callable[[nn.Module], None] | None = None
    """Takes a copy of the model with the weights that the run began with, on the device of the run, before the first pass. The run
    must begin with the weights of another run, and keeps them in its folder."""
    comparable: bool = True
    """Whether the training loss is the one that evaluations measure if the settings of `loss` are plain. If not, the alerts that
    compare both are off."""
    writes: bool = True
    """Whether the model continues texts. If not, evaluations have no samples, and `generate` refuses the run."""

    @property
    def predicts_tokens(self) -> bool:
        return self.rows is Rows

    @property
    def has_perplexity(self) -> bool:
        """Whether the training loss is the cross-entropy of tokens, so that `exp(loss)` is a perplexity."""
        return self.predicts_tokens and self.step is None

    @property
    def digests(self) -> dict[str, str]:
        return {f"objective.{name}": f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in sorted(self.files.items())}


LANGUAGE = Task()
"""The ordinary training of a language model: it changes nothing."""


class Kind(NamedTuple):
    """How a task is made: `make(config, gather(config, manifest))`, or from the files of a saved run."""

    gather: Callable[[TrainConfig, Manifest], Mapping[str, bytes]]
    """Returns `Task.files` at the start of a training, from data and other inputs."""
    make: Callable[[TrainConfig, Mapping[str, bytes]], Task]
    """Returns the task for these files. They may come from a stranger's run: check them, and raise CheckpointError."""
