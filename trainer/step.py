"""One optimizer step: forward and backward over the micro-batches, clipping, update."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data_pipeline.errors import GuardError
from trainer.config import TrainConfig
from trainer.distributed import Group
from trainer.loader import GlobalBatch, MicroBatch
from trainer.loss import IGNORE, cross_entropy_sum
from trainer.model import Decoder

__all__ = ["LossModule", "StepResult", "autocast", "make_scaler", "train_step", "wrap_for_training"]

_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LossModule(nn.Module):
    """The model and its loss in one forward pass, which is what is compiled and what DDP wraps."""

    def __init__(self, model: Decoder, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor, positions_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Sum of the loss over all targets, a fp32 scalar."""
        return cross_entropy_sum(self.model(tokens_BL, segments_BL, positions_BL), targets_BL, self.label_smoothing)


@dataclass(frozen=True)
class StepResult:
    """What one step reports; the same on every rank."""

    loss: float
    """Mean over the targets of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping; not finite where an fp16 overflow made the scaler skip the update."""
    stop_votes: int
    """Ranks that were asked to stop."""
    seconds: float
    """Training time of rank 0 so far."""


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast | nullcontext[None]:
    """The context of a forward pass in the run's precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST_TYPES[config.precision])


def make_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """Scales fp16 losses so that small gradients do not vanish; does nothing in other precisions."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")


def wrap_for_training(model: Decoder, config: TrainConfig, group: Group, row_length: int) -> nn.Module:
    """The model with its loss, compiled if wanted, under DDP if there are several ranks.

    DDP regroups its gradient buckets after the first backward pass, and with three or more ranks another grouping is
    another order of addition. One pass over an empty batch here makes the first step of a fresh run and of a resumed one
    use the same grouping.
    """
    module: nn.Module = LossModule(model, config.loss.label_smoothing)
    if config.compile == "on" or (config.compile == "auto" and group.device.type == "cuda"):
        module.compile(dynamic=False)
    if group.world_size == 1:
        return module
    device_ids = [group.device] if group.device.type == "cuda" else None
    module = DistributedDataParallel(module, device_ids=device_ids, gradient_as_bucket_view=True)
    empty = torch.zeros(config.batch.micro, row_length, dtype=torch.int64)
    batch = MicroBatch(empty, empty.int(), empty, torch.full_like(empty, IGNORE)).to(group.device)
    with autocast(config, group.device):
        loss = module(batch.tokens, batch.segments, batch.positions, batch.targets)
    loss.backward()
    module.zero_grad(set_to_none=True)
    return module


def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batch: GlobalBatch,
    config: TrainConfig,
    group: Group,
    *,
    stop_requested: bool,
    seconds: float,
) -> StepResult:
    """Updates the weights by one global batch.

    The loss of every micro-batch is a sum, divided by the targets of the whole global batch before backward, so that the
    gradient is that of the mean however the batch is cut.

    Raises:
        GuardError: the gradient is not finite, in fp32 or bf16; the weights are as they were before the step.
    """
    optimizer.zero_grad(set_to_none=True)
    loss_sum = torch.zeros((), dtype=torch.float64, device=group.device)
    # DDP averages gradients over the ranks where the sum is wanted.
    scale = group.world_size / max(1, batch.num_targets)
    for number, micro_batch in enumerate(batch.micro_batches, start=1):
        micro = micro_batch.to(group.device)
        with _synchronised(module, last=number == len(batch.micro_batches)):
            with autocast(config, group.device):
                micro_sum = module(micro.tokens, micro.segments, micro.positions, micro.targets)
            scaler.scale(micro_sum * scale).backward()
        loss_sum += micro_sum.detach()
    scaler.unscale_(optimizer)
    weights = [weight for parameters in optimizer.param_groups for weight in parameters["params"]]
    grad_norm = nn.utils.clip_grad_norm_(weights, config.optim.clip_norm, foreach=True)

    report = torch.stack(
        (loss_sum, loss_sum.new_tensor(float(stop_requested)), loss_sum.new_tensor(seconds if group.is_main else 0.0))
    )
    total, votes, agreed_seconds = group.sum(report).tolist()
    result = StepResult(total / max(1, batch.num_targets), grad_norm.item(), int(votes), agreed_seconds)
    if not math.isfinite(result.grad_norm) and not scaler.is_enabled():
        raise GuardError(
            f"rows {batch.start} to {batch.start + len(batch.rows) - 1}: loss {result.loss}, gradient norm "
            f"{result.grad_norm}; the update was "
            "not made. Lower optim.lr, use precision fp32 or bf16, or look at these rows; the last "
            "checkpoint is from before this step"
        )
    scaler.step(optimizer)
    scaler.update()
    return result


def _synchronised(module: nn.Module, *, last: bool) -> nullcontext[None]:
    """Lets DDP exchange gradients in the last micro-batch only."""
    if isinstance(module, DistributedDataParallel) and not last:
        return cast("nullcontext[None]", module.no_sync())
    return nullcontext()
