"""One optimizer step: forward and backward over the micro-batches, clipping, update; nothing in it waits for the device.

The numbers of a step travel to the host while the device goes on, and are read one step later (`StepResults`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from data_pipeline.errors import ConfigError
from data_pipeline.shards import RowBatch
from trainer.accumulation import Accumulation, DdpAccumulation, FsdpAccumulation, PlainAccumulation, TreeAccumulation
from trainer.attention import Backend, Layout, make_layout
from trainer.config import LossConfig, TrainConfig
from trainer.determinism import seed_micro_batch
from trainer.distributed import Group
from trainer.guard import Thresholds
from trainer.loader import GlobalBatch, MicroBatch, micro_batch, share_of_rank
from trainer.loss import cross_entropy_rows, cross_entropy_sum, linear_cross_entropy_rows, linear_cross_entropy_sum
from trainer.model import Decoder, parameters_by_name
from trainer.optim import step_unless
from trainer.parallel import shard
from trainer.reduction import GradientTree
from trainer.straggler import OwnTime

__all__ = [
    "LossModule",
    "PendingStep",
    "StepResult",
    "StepResults",
    "TrainingModule",
    "autocast",
    "empty_micro_batch",
    "forward_pass",
    "make_scaler",
    "train_step",
    "wrap_for_training",
]

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""From logits (B, L, V), targets (B, L) and weights (B, L) or None to the weighted sum over all targets, a fp32 scalar."""

_NO_LIMITS = Thresholds()
_NUM_NOTES = 5
"""Numbers of a step's report that come before the losses of its micro-batches."""
_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}


class LossModule(nn.Module):
    """The model and its loss in one forward pass, which is what is compiled, and what DDP and FSDP wrap."""

    def __init__(self, model: nn.Module, settings: LossConfig, own_loss: LossFunction | None = None) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.own_loss = own_loss

    def forward(
        self, tokens_BL: Tensor, layout: Layout, targets_BL: Tensor, weights_BL: Tensor | None = None, *, by_row: bool = False
    ) -> Tensor:
        """The sum of the loss over all targets, a fp32 scalar; or, for evaluation, each row's plain cross-entropy, (B,) in fp64."""
        model = self.model
        if isinstance(model, Decoder) and (by_row or self.own_loss is None):  # no logits of the whole micro-batch
            hidden_BLD = model.hidden(tokens_BL, layout)
            if by_row:
                return linear_cross_entropy_rows(hidden_BLD, model.lm_head.weight, targets_BL)
            return linear_cross_entropy_sum(hidden_BLD, model.lm_head.weight, targets_BL, self.settings, weights_BL)
        logits_BLV = model(tokens_BL, layout)
        if by_row:
            return cross_entropy_rows(logits_BLV, targets_BL)
        return (self.own_loss or partial(cross_entropy_sum, settings=self.settings))(logits_BLV, targets_BL, weights_BL)


@dataclass(frozen=True)
class TrainingModule:
    """What a step works on."""

    loss: LossModule
    """The model with its loss, on this rank alone."""
    module: nn.Module
    """The same as it is called in training: under DDP where there are several ranks."""
    accumulation: Accumulation
    scaler: torch.amp.GradScaler
    backend: Backend
    """Of the attention."""
    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All weights in the order of their names."""
        return list(parameters_by_name(self.loss.model).values())


@dataclass(frozen=True)
class StepResult:
    """What one step reports; the same on every rank."""

    step: int
    """Number of the step, from 1."""
    loss: float
    """Mean over the targets (or sequences) of the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""
    stop_votes: int
    """Ranks that were asked to stop."""
    seconds: float
    """Training time of rank 0 before this step."""
    save_failed: bool
    """A checkpoint could not be written in the background."""
    acknowledged_step: int
    """The newest checkpoint that is on the device, as rank 0 knew before this step; -1: none since the start."""
    own_times: tuple[OwnTime, ...]
    """Of each rank: in this step, or in the newest that its device had finished before."""


class PendingStep:
    """The numbers of a step, on their way from the device."""

    def __init__(self, step: int, report: Tensor, skip: Tensor, batch: GlobalBatch, num_ranks: int) -> None:
        self.skip = skip
        """On the device: 1 where the update was withheld, else 0."""
        self._step = step
        self._normaliser = batch.normaliser
        self._num_ranks = num_ranks
        self._arrived: torch.cuda.Event | None = None
        if report.is_cuda:
            self._report = torch.empty_like(report, device="cpu", pin_memory=True)
            self._report.copy_(report, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._report = report

    def result(self) -> StepResult:
        """Waits for the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        votes, seconds, grad_norm, save_failed, acknowledged_step, *rest = self._report.tolist()
        own_s, losses = rest[: 2 * self._num_ranks], rest[2 * self._num_ranks :]
        return StepResult(
            step=self._step,
            loss=math.fsum(losses) / self._normaliser,
            grad_norm=grad_norm,
            stop_votes=int(votes),
            seconds=seconds,
            save_failed=bool(save_failed),
            acknowledged_step=int(acknowledged_step),
            own_times=tuple(OwnTime(*pair) for pair in zip(own_s[::2], own_s[1::2], strict=True)),
        )


FactsT = TypeVar("FactsT")


class StepResults(Generic[FactsT]):
    """Results in the order of the steps, each read `lag` steps after its own, so that the host is ahead of the device."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._pending: deque[tuple[PendingStep, FactsT]] = deque()

    def add(self, pending: PendingStep, facts: FactsT) -> None:
        """Takes the next step, with what the host knows of it."""
        self._pending.append((pending, facts))

    def due(self, *, everything: bool = False) -> Iterator[tuple[StepResult, FactsT]]:
        """The results that are to be read now, or all that are left."""
        while len(self._pending) > (0 if everything else self._lag):
            pending, facts = self._pending.popleft()
            yield pending.result(), facts


def empty_micro_batch(num_rows: int, row_length: int, backend: Backend, *, with_weights: bool = False) -> MicroBatch:
    """A micro-batch of padding alone: for passes that must not change anything."""
    nothing = np.zeros((num_rows, row_length), np.uint16)
    return micro_batch(
        RowBatch(nothing, np.full(nothing.shape, -1, np.int32)), with_weights=with_weights, with_bounds=backend == "varlen"
    )


def forward_pass(
    module: nn.Module, rows: MicroBatch, config: TrainConfig, device: torch.device, backend: Backend, *, by_row: bool = False
) -> Tensor:
    """What a `LossModule`, as it is or wrapped, makes of a micro-batch, in the run's precision: see its `forward`."""
    micro = rows.to(device)
    layout = make_layout(micro.segments, micro.positions, backend, micro.bounds)
    with autocast(config, device):
        result: Tensor = module(micro.tokens, layout, micro.targets, micro.weights, by_row=by_row)
    return result


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast | nullcontext[None]:
    """The context of a forward pass in the run's precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST_TYPES[config.precision])


def make_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """Scales fp16 losses so that small gradients do not vanish; does nothing in other precisions."""
    return torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")


def wrap_for_training(
    loss: LossModule, config: TrainConfig, group: Group, row_length: int, backend: Backend
) -> tuple[nn.Module, Accumulation]:
    """The model with its loss, compiled if wanted, and spread over the ranks as the settings say.

    Raises:
        ConfigError: the number of ranks does not fit `reproducibility = elastic`.
    """
    compiled = config.compiles(group.device.type)
    if config.parallel == "fsdp" and group.world_size > 1:
        if compiled and isinstance(loss.model, Decoder):
            for layer in loss.model.model.layers:  # whole, and between the exchanges
                layer.compile(dynamic=False)
        sharded = shard(loss, group)
        return sharded, FsdpAccumulation(sharded, list(loss.parameters()))
    parameters = list(parameters_by_name(loss.model).values())
    if compiled:
        loss.compile(dynamic=False)
    if config.reproducibility == "elastic":
        if group.world_size & (group.world_size - 1):
            raise ConfigError(
                f"reproducibility = elastic adds gradients in a binary tree, which {group.world_size} ranks do not make; "
                "start 1, 2, 4 or 8 of them (any power of two up to the number of micro-batches)"
            )
        return loss, TreeAccumulation(GradientTree(parameters, group))
    if group.world_size == 1:
        return loss, PlainAccumulation(parameters)
    device_ids = [group.device] if group.device.type == "cuda" else None
    module = DistributedDataParallel(loss, device_ids=device_ids, gradient_as_bucket_view=True)
    _settle_buckets(module, config, group, row_length, backend)
    return module, DdpAccumulation(module, parameters)


def _settle_buckets(module: DistributedDataParallel, config: TrainConfig, group: Group, row_length: int, backend: Backend) -> None:
    """Runs one pass over an empty batch, so that the first step of a fresh run and of a resumed one add alike.

    DDP regroups its gradient buckets after the first backward pass, and with three or more ranks another grouping is another
    order of addition.
    """
    by_sequence = config.loss.normalise == "sequences"
    empty = empty_micro_batch(config.batch.micro_rows, row_length, backend, with_weights=by_sequence)
    forward_pass(module, empty, config, group.device, backend).backward()  # type: ignore[no-untyped-call]
    module.zero_grad(set_to_none=True)


def train_step(
    training: TrainingModule,
    batch: GlobalBatch,
    config: TrainConfig,
    group: Group,
    *,
    step: int,
    stop_requested: bool,
    seconds: float,
    save_failed: bool = False,
    acknowledged_step: int = -1,
    limits: Thresholds = _NO_LIMITS,
    before_exchange: Callable[[], OwnTime] = lambda: OwnTime(0.0, 0.0),
) -> PendingStep:
    """Updates the weights by one global batch, unless its loss or gradient is not finite, or outside of the limits.

    The loss of every micro-batch is a sum, divided by the targets of the whole global batch before backward, so that the
    gradient is that of the mean however the batch is cut. Each micro-batch's loss has a place of its own in the report; the
    places of other ranks are zero, and adding zero changes no bit.

    Args:
        training: what is trained.
        batch: this rank's part of the global batch.
        config: the run's settings.
        group: the ranks.
        step: number of this step, from 1.
        stop_requested: true where this rank was asked to stop.
        seconds: this rank's training time so far.
        save_failed: true where this rank could not write a checkpoint.
        acknowledged_step: the newest checkpoint that this rank has written.
        limits: of loss and gradient norm, beyond which the update is withheld.
        before_exchange: called at the last moment at which this rank cannot have waited for another; what it gives is reported.
    """
    own = share_of_rank(config.batch.micro_batches, group)
    losses = torch.zeros(config.batch.micro_batches, dtype=torch.float64, device=group.device)
    scale = (group.world_size if training.accumulation.averages else 1) / batch.normaliser
    training.accumulation.begin()
    own_time = OwnTime(0.0, 0.0)
    for number, rows in zip(own, batch.micro_batches, strict=True):
        seed_micro_batch(config.seed, step, number)
        with training.accumulation.micro_batch(last=number == own[-1]):
            micro_sum = forward_pass(training.module, rows, config, group.device, training.backend)
            if number == own[-1]:
                own_time = before_exchange()
            training.scaler.scale(micro_sum * scale).backward()  # type: ignore[no-untyped-call]
        losses[number] = micro_sum.detach()
    training.accumulation.finish()
    grad_norm = _clip(training, config.optim.clip_norm)
    num_notes = _NUM_NOTES + 2 * group.world_size
    report = losses.new_zeros(num_notes + len(losses))
    report[0] = float(stop_requested)
    if group.is_main:  # what is the same everywhere, or known on rank 0 alone
        report[1], report[2], report[3], report[4] = seconds, grad_norm, float(save_failed), float(acknowledged_step)
    own_place = _NUM_NOTES + 2 * group.rank
    report[own_place], report[own_place + 1] = own_time.seconds, own_time.data_s
    report[num_notes:] = losses
    report = group.sum(report)
    skip = (~_is_healthy(report[num_notes:].sum() / batch.normaliser, report[2], limits)).float()
    step_unless(training.optimizers, skip)
    training.scaler.update()
    return PendingStep(step, report, skip, batch, group.world_size)


def _clip(training: TrainingModule, clip_norm: float) -> Tensor:
    """Scales the gradient down to `clip_norm` where it is longer; returns its norm before."""
    for optimizer in training.optimizers:
        training.scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(training.parameters, clip_norm, foreach=True)
    return grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm


def _is_healthy(loss: Tensor, grad_norm: Tensor, limits: Thresholds) -> Tensor:
    """On the device, what `Thresholds.skips` says: whether the update is made."""
    return (
        loss.isfinite()
        & grad_norm.isfinite()
        & (grad_norm <= limits.skip_norm_above)
        & (grad_norm >= limits.skip_norm_below)
        & (loss <= limits.skip_loss_above)
        & (loss >= limits.skip_loss_below)
    )
