from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.errors import ConfigError
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer
from trainer.checkpoint.async_saver import Staging
from trainer.checkpoint.store import Checkpoint
from trainer.config import LossConfig, TrainConfig
from trainer.context import RunContext
from trainer.data.batch import GlobalBatch
from trainer.data.loader import prefetched_batches
from trainer.data.order import RowOrder
from trainer.extensions.hooks import Extension, RunView, seeded_model
from trainer.finetuning.initial_weights import read_reference
from trainer.finetuning.task import LANGUAGE, Task
from trainer.model.forward import LossModule
from trainer.model.lora import adapter_names, add_adapters
from trainer.model.parameters import parameters_by_name
from trainer.optim.adamw import Optimizer
from trainer.optim.optimizers import optimizer_tensors, restore_optimizer
from trainer.optim.weight_average import WeightAverage
from trainer.parallel.accumulation import Accumulation
from trainer.parallel.fsdp import distribute_like, full_tensors, load_full
from trainer.runs.adjustments import Adjustments
from trainer.runs.record import Origin
from trainer.runs.state import Progress, RunState


@dataclass(frozen=True)
class RunData:
    context: RunContext
    train_rows: Rows
    val_rows: Rows
    order: RowOrder
    tokenizer: Tokenizer

    def batches(self, progress: Progress, adjustments: Adjustments) -> AbstractContextManager[Iterator[GlobalBatch]]:
        config = self.context.config
        return prefetched_batches(
            self.train_rows,
            config.batch,
            self.context.group,
            self.order,
            progress.rows,
            config.prefetch,
            loader=config.loader,
            with_weights=config.loss.reduction == "sequences",
            with_bounds=self.context.backend == "varlen",
            left_out=progress.left_out,
            first_step=progress.step + 1,
            adjustments=adjustments,
            shard_of=self.train_rows.shard_of,
        )


@dataclass
class Trainable:
    context: RunContext
    extension: Extension
    loss: LossModule  # the model with its loss, without the exchange between ranks
    module: nn.Module  # `loss` as the training calls it: wrapped by DDP or FSDP if the settings say so
    accumulation: Accumulation
    scaler: torch.amp.GradScaler
    optimizers: tuple[Optimizer, ...]
    average: WeightAverage | None = None  # the moving average of the weights, None if the settings turn it off
    task: Task = LANGUAGE

    @property
    def model(self) -> nn.Module:
        return self.loss.model

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return parameters_by_name(self.model)

    @property
    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters.values() if parameter.requires_grad)

    def view(self, progress: Progress) -> RunView:
        context = self.context
        return RunView(context.group.rank, context.group.world_size, context.config, self.model, progress)

    def weights(self) -> dict[str, Tensor]:
        # all ranks must call this
        return full_tensors(self.parameters, self.context.group)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return weights, optimizer state and moving average by their group in a checkpoint. They are not copied."""
        average = self.average.tensors() if self.average else {}
        return {"model": {**self.parameters}, "optimizer": optimizer_tensors(self.model, self.optimizers), "average": average}

    def checkpoint(self, state: RunState, staging: Staging) -> Checkpoint:
        """Return a checkpoint with this state. Its tensors are in `staging`, whole on rank 0. All ranks must call this."""
        group = self.context.group
        copies = {name: full_tensors(each, group, staging.of(name)) for name, each in self.tensors().items()}
        return Checkpoint(state.progress.step, state=state.to_json(), **copies)

    def begin_with(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights of a new model and its average by those of a run. The task names weights that one of both lacks."""
        common = {name: weight for name, weight in weights.items() if name not in self.task.dropped}
        new = self.task.fresh | adapter_names(self.model)
        load_full(self.model, common, new=new, remedy="choose another init, or the extension that built its model")
        if self.average is not None:
            self.average.begin_again()

    def restore(self, checkpoint: Checkpoint, state: RunState) -> None:
        load_full(self.model, checkpoint.model)
        restore_optimizer(self.model, self.optimizers, distribute_like(self.parameters, checkpoint.optimizer))
        if self.average is not None:
            self.average.restore(distribute_like(self.parameters, checkpoint.average))
        if state.scaler:  # empty if the run was not in fp16 before
            self.scaler.load_state_dict(dict(state.scaler))

    def unwrap(self) -> None:
        """Drop the parts that a failed pass may have left incomplete. Weights and optimizers are unchanged."""
        scaler = make_scaler(self.context)
        scaler.load_state_dict(self.scaler.state_dict())
        # Dropping DDP removes its hooks on the weights. Its destructor waits for its exchanges: see `trainer.distributed.group`.
        self.module, self.accumulation, self.scaler = self.loss, Accumulation(()), scaler


def new_model(extension: Extension, task: Task, config: TrainConfig, vocab_size: int) -> nn.Module:
    if task.model is not None:
        model = task.model(config.model, vocab_size, config.seed)
    else:
        model = seeded_model(extension, config.model, vocab_size, config.seed)
    add_adapters(model, config.lora, config.seed, trained=task.fresh)
    return model


def new_loss(model: nn.Module, extension: Extension, task: Task, settings: LossConfig) -> LossModule:
    score = None if task.measures is None else task.measures.score
    return LossModule(model, settings, extension.custom_loss or task.loss, score)


def hold_reference(context: RunContext, task: Task, origin: Origin | None) -> None:
    """Hand a copy of the model with the initial weights of the run to the task. All ranks must call this."""
    config = context.config
    if origin is None:
        raise ConfigError(f"{config.run}: objective = {config.objective} needs the weights of another run; begin a run with --init")
    weights = context.group.on_all(lambda: read_reference(config.run, origin.weights))
    hold_copy(context, task, weights)


def hold_copy(context: RunContext, task: Task, weights: Mapping[str, Tensor] | None = None) -> None:
    """Hand a copy of the model without adapters to a task that needs one, with these weights; without them for a trial."""
    if task.reference is not None:
        model = new_model(Extension(), task, context.config.without_adapters, context.manifest.vocab_size)
        if weights is not None:
            load_full(model, weights)
        task.reference(model.to(context.group.device))


def make_scaler(context: RunContext) -> torch.amp.GradScaler:
    """Return a scaler of fp16 losses, which keeps small gradients above zero. It does nothing in other precisions."""
    device = context.group.device
    scaler = torch.amp.GradScaler(device.type, enabled=context.config.number_format == "fp16")
    scaler.scale(torch.zeros((), device=device))  # creates its state on the device now, not in the first step
    return scaler


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[Tensor]:
    return [value for value in vars(scaler).values() if isinstance(value, Tensor)]
