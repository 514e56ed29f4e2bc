"""One optimizer step: forward and backward over the micro-batches, clipping, update; nothing in it waits for the device.

The numbers of a step travel to the host while the device goes on, and are read one step later (`StepResults`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.errors import ConfigError, ProjectError
from trainer.accumulation import Accumulation, DdpAccumulation, FsdpAccumulation, PlainAccumulation, TreeAccumulation
from trainer.attention import Backend, Layout, make_layout
from trainer.config import LossConfig, TrainConfig
from trainer.determinism import seed_micro_batch
from trainer.distributed.group import Group
from trainer.distributed.stragglers import OwnTime
from trainer.guard import Thresholds
from trainer.layer_stats import StepObserver
from trainer.loader import DataFault, GlobalBatch, MicroBatch, blank_micro_batch, share_of_rank
from trainer.loss import cross_entropy_rows, cross_entropy_sum, linear_cross_entropy_rows, linear_cross_entropy_sum
from trainer.memory import is_out_of_memory, release_memory
from trainer.model import Decoder, parameters_by_name
from trainer.optim import step_unless
from trainer.parallel import shard
from trainer.reduction import GradientTree

__all__ = [
    "LossModule",
    "MicroTooLarge",
    "OutOfMemoryAloneError",
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

_log = logging.getLogger(__name__)

_NO_LIMITS = Thresholds()
_NUM_NOTES = 7
_STOP, _SECONDS, _NORM, _SAVE_FAILED, _ACKNOWLEDGED, _MEMORY, _DATA = range(_NUM_NOTES)
"""Places of the numbers of a step's report that come before the ranks' own times and the losses of micro-batches."""
_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}


class OutOfMemoryAloneError(ProjectError):
    """This rank ran out of memory where it cannot go on with the others, so that the group has to be started again."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"out of memory in step {step}, where a rank cannot go on with the others; run the same command again: it goes on from "
            f"the newest checkpoint, with smaller micro-batches from step {step} on"
        )
        self.step = step


class MicroTooLarge(Exception):  # noqa: N818 - a finding that leads to smaller ones, no error
    """A pass over a micro-batch of padding ran out of memory on some rank; raised on all of them."""


class LossModule(nn.Module):
    """The model and its loss in one forward pass, which is what is compiled, and what DDP and FSDP wrap."""

    def __init__(self, model: nn.Module, settings: LossConfig, own_loss: LossFunction | None = None) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.own_loss = own_loss
        self.most_rows: int | None = None
        """Rows that a pass of an evaluation takes at most, because more of them ran out of memory."""

    def forward(
        self, tokens_BL: Tensor, layout: Layout, targets_BL: Tensor, weights_BL: Tensor | None = None, *, by_row: bool = False
    ) -> Tensor:
        """The sum of the loss over all targets, a fp32 scalar; or, for evaluation, each position's cross-entropy, (B, L)."""
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
    """The same as it is called in training: wrapped by DDP or FSDP where the settings ask for it."""
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
    applied: bool
    """The update was made, as the device decided."""
    memory_votes: int
    """Ranks that ran out of memory."""
    data_votes: int
    """Ranks that could not read their rows."""
    fault: DataFault | None
    """What this rank could not read; of all that is here, this alone is not the same on every rank."""

    @property
    def void(self) -> bool:
        """A rank failed, so that nothing of the step counts and it has to be made again."""
        return self.memory_votes > 0 or self.data_votes > 0


class PendingStep:
    """The numbers of a step, on their way from the device.

    Args:
        step: its number.
        report: what was added up over the ranks; see `_report`.
        skip: on the device: 1 where the update was withheld, else 0.
        void: on the device: true where a rank failed, in this step or in one before that is still on its way.
        batch: this rank's part of the global batch.
        num_ranks: of the group.
        ran_out: this rank itself ran out of memory, in this step or in one before that is still on its way.
    """

    def __init__(
        self, step: int, report: Tensor, skip: Tensor, void: Tensor, batch: GlobalBatch, num_ranks: int, *, ran_out: bool = False
    ) -> None:
        self.skip, self.void, self.ran_out = skip, void, ran_out
        self._step = step
        self._normaliser = batch.normaliser
        self._fault = batch.fault
        self._num_ranks = num_ranks
        self._arrived: torch.cuda.Event | None = None
        numbers = torch.cat([skip.to(report.dtype).reshape(1), report])
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._numbers = numbers

    def result(self) -> StepResult:
        """Waits for the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        skip, votes, seconds, grad_norm, save_failed, acknowledged_step, memory_votes, data_votes, *rest = self._numbers.tolist()
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
            applied=not skip,
            memory_votes=int(memory_votes),
            data_votes=int(data_votes),
            fault=self._fault,
        )


FactsT = TypeVar("FactsT")


class StepResults(Generic[FactsT]):
    """Results in the order of the steps, each read `lag` steps after its own, so that the host is ahead of the device."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._pending: deque[tuple[PendingStep, FactsT]] = deque()

    @property
    def newest(self) -> PendingStep | None:
        """The last step whose numbers have not been read."""
        return self._pending[-1][0] if self._pending else None

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
    return blank_micro_batch(num_rows, row_length, with_weights=with_weights, with_bounds=backend == "varlen")


def forward_pass(
    module: nn.Module, rows: MicroBatch, config: TrainConfig, device: torch.device, backend: Backend, *, by_row: bool = False
) -> Tensor:
    """What a `LossModule`, as it is or wrapped, makes of a micro-batch, in the run's precision: see its `forward`.

    With `by_row`, rows for which memory does not suffice are cut in two, as often as it takes. Each has a result of its own. Not
    under `parallel = fsdp`, where all ranks have to make the same number of passes.
    """
    if by_row and config.parallel != "fsdp" and isinstance(module, LossModule):
        return _pass_in_parts(module, rows, config, device, backend)
    return _pass(module, rows, config, device, backend, by_row=by_row)


def _pass(
    module: nn.Module, rows: MicroBatch, config: TrainConfig, device: torch.device, backend: Backend, *, by_row: bool
) -> Tensor:
    micro = rows.to(device)
    if micro.bounds is not None:  # else a micro-batch with more pieces than any before compiles the model again
        torch._dynamo.maybe_mark_dynamic(micro.bounds, 0)
    layout = make_layout(micro.segments, micro.positions, backend, micro.bounds)
    with autocast(config, device):
        result: Tensor = module(micro.tokens, layout, micro.targets, micro.weights, by_row=by_row)
    return result


def _pass_in_parts(loss: LossModule, rows: MicroBatch, config: TrainConfig, device: torch.device, backend: Backend) -> Tensor:
    num_rows = len(rows.tokens)
    if loss.most_rows is None or num_rows <= loss.most_rows:
        try:
            return _pass(loss, rows, config, device, backend, by_row=True)
        except Exception as error:
            if num_rows == 1 or not is_out_of_memory(error):
                raise
            _log.warning("an evaluation ran out of memory with %d rows in a pass; from now on it takes half as many", num_rows)
            loss.most_rows = num_rows // 2
    release_memory()  # here, where the error and the tensors that it held are gone
    return torch.cat([_pass_in_parts(loss, half, config, device, backend) for half in rows.halves()])


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast | nullcontext[None]:
    """The context of a forward pass in the run's precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST_TYPES[config.precision])


def make_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler:
    """Scales fp16 losses so that small gradients do not vanish; does nothing in other precisions."""
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    scaler.scale(torch.zeros((), device=device))  # its state lies on the device from here on, and not from the first step on
    return scaler


def wrap_for_training(
    loss: LossModule, config: TrainConfig, group: Group, row_length: int, backend: Backend
) -> tuple[nn.Module, Accumulation]:
    """The model with its loss, compiled if wanted, and spread over the ranks as the settings say.

    Raises:
        MicroTooLarge: memory does not suffice for a micro-batch, as far as that is known before the first step.
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
    # Buffers are the same on all ranks from the beginning, and are no state (see trainer.extension): no exchange keeps them so.
    module = DistributedDataParallel(loss, device_ids=device_ids, gradient_as_bucket_view=True, forward_sync_buffers=False)
    accumulation = DdpAccumulation(module, parameters)
    _settle_buckets(module, config, group, row_length, backend)
    return module, accumulation


def _settle_buckets(module: DistributedDataParallel, config: TrainConfig, group: Group, row_length: int, backend: Backend) -> None:
    """Runs passes over an empty batch, so that the first step of a fresh run and of a resumed one add alike.

    DDP regroups its gradient buckets after the first backward pass, and with three or more ranks another grouping is another
    order of addition. The second pass shows what the new groups are. One without an exchange comes before, as a rank that ran out
    of memory before it knows the groups could not do its part.
    """
    by_sequence = config.loss.normalise == "sequences"
    empty = empty_micro_batch(config.batch.micro_rows, row_length, backend, with_weights=by_sequence)

    def backward() -> None:
        forward_pass(module, empty, config, group.device, backend).backward()  # type: ignore[no-untyped-call]
        module.zero_grad(set_to_none=True)

    if not group.smallest(_fits(module, backward)):
        raise MicroTooLarge
    backward()
    backward()


def _fits(module: DistributedDataParallel, backward: Callable[[], None]) -> bool:
    try:
        with module.no_sync():
            backward()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


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
    after: PendingStep | None = None,
    observer: StepObserver | None = None,
) -> PendingStep:
    """Updates the weights by one global batch, unless its loss or gradient is not finite, or outside of the limits.

    A rank that runs out of memory, or whose rows could not be read, still takes part in every exchange, and says so in the
    report. All ranks then withhold the update, and those of the steps that are under way already, so that the state is as it was
    before the step. Nobody waits for that, and nobody is left waiting.

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
        after: the step before, where its numbers have not been read yet.
        observer: looks at the gradients before they are clipped, and at the weights before and after the update. All ranks have
            one, or none has.

    Raises:
        OutOfMemoryAloneError: this rank ran out of memory, and cannot do its part of the exchanges.
    """
    scaler_before = [value.clone() for value in _tensors_of(training.scaler)]
    losses = torch.zeros(batch.num_micro_batches, dtype=torch.float64, device=group.device)
    gradient, begun = None, after is None or not after.ran_out
    if begun:
        with _alone(step):
            training.accumulation.begin()
        gradient = _attempt(training, batch, config, group, step, losses, before_exchange, observer)
    if gradient is None:  # not inside `_attempt`, where the error still holds the tensors of the pass that broke off
        _join(training.accumulation, len(share_of_rank(batch.num_micro_batches, group)), step, begun=begun)
    report = group.sum(
        _report(
            group,
            losses,
            gradient,
            stop_requested=stop_requested,
            seconds=seconds,
            save_failed=save_failed,
            acknowledged_step=acknowledged_step,
            lacks_data=batch.fault is not None,
        )
    )
    void = report[_MEMORY] + report[_DATA] > 0
    if after is not None:
        void = void | after.void
    loss = report[len(report) - len(losses) :].sum() / batch.normaliser
    skip = (void | ~_is_healthy(loss, report[_NORM], limits)).float()
    if gradient is not None:
        with _alone(step):  # some weights would be updated and some not
            step_unless(training.optimizers, skip)
        if observer is not None:
            observer.after_update(step)
        training.scaler.update()
        for now, before in zip(_tensors_of(training.scaler), scaler_before, strict=True):
            now.copy_(torch.where(void, before, now))
    return PendingStep(step, report, skip, void, batch, group.world_size, ran_out=gradient is None)


@dataclass(frozen=True)
class _Gradient:
    """The gradient of the global batch is in the parameters, clipped."""

    norm: Tensor
    """Before clipping."""
    own_time: OwnTime


def _attempt(
    training: TrainingModule,
    batch: GlobalBatch,
    config: TrainConfig,
    group: Group,
    step: int,
    losses: Tensor,
    before_exchange: Callable[[], OwnTime],
    observer: StepObserver | None,
) -> _Gradient | None:
    """Sums up the gradient and fills in this rank's losses; None where memory ran out.

    Raises:
        OutOfMemoryAloneError: it did, and this rank cannot do its part of the exchanges.
    """
    accumulation, own_time = training.accumulation, OwnTime(0.0, 0.0)
    own = share_of_rank(batch.num_micro_batches, group)
    scale = (group.world_size if accumulation.averages else 1) / batch.normaliser
    try:
        for number, rows in zip(own, batch.micro_batches, strict=True):
            seed_micro_batch(config.seed, step, number)
            with accumulation.micro_batch(last=number == own[-1]):
                micro_sum = forward_pass(training.module, rows, config, group.device, training.backend)
                if number == own[-1]:
                    own_time = before_exchange()
                training.scaler.scale(micro_sum * scale).backward()  # type: ignore[no-untyped-call]
            losses[number] = micro_sum.detach()
        accumulation.finish()
        for optimizer in training.optimizers:
            training.scaler.unscale_(optimizer)
        if observer is not None:
            observer.before_update(step)
        return _Gradient(_clip(training, config.optim.clip_norm), own_time)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if not accumulation.can_join:
            raise OutOfMemoryAloneError(step) from error
        _log.warning("rank %d ran out of memory in step %d: %s", group.rank, step, str(error))
        return None


@contextmanager
def _alone(step: int) -> Iterator[None]:
    """Has this rank end where memory runs out in here, as it can do nothing that the others could go on with."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryAloneError(step) from error


def _join(accumulation: Accumulation, num_passes: int, step: int, *, begun: bool) -> None:
    release_memory()
    with _alone(step):
        if not begun:
            accumulation.begin()  # else the exchanges of the step before would count as this one's
        accumulation.join(num_passes)


def _report(
    group: Group,
    losses: Tensor,
    gradient: _Gradient | None,
    *,
    stop_requested: bool,
    seconds: float,
    save_failed: bool,
    acknowledged_step: int,
    lacks_data: bool,
) -> Tensor:
    """What this rank adds to the report, fp64: `_NUM_NOTES` notes, the ranks' own times in pairs, the losses of micro-batches."""
    num_notes = _NUM_NOTES + 2 * group.world_size
    # Written on the host and copied from pinned memory: to write one number into a tensor on a GPU waits for the GPU.
    notes = torch.zeros(num_notes, dtype=losses.dtype, pin_memory=losses.is_cuda)
    notes[_STOP], notes[_MEMORY], notes[_DATA] = float(stop_requested), float(gradient is None), float(lacks_data)
    if group.is_main:  # what is the same everywhere, or known on rank 0 alone
        notes[_SECONDS], notes[_SAVE_FAILED], notes[_ACKNOWLEDGED] = seconds, float(save_failed), float(acknowledged_step)
    if gradient is not None:
        own_place = _NUM_NOTES + 2 * group.rank
        notes[own_place], notes[own_place + 1] = gradient.own_time.seconds, gradient.own_time.data_s
    report = torch.cat([notes.to(losses.device, non_blocking=True), losses])
    if gradient is not None and group.is_main:
        report[_NORM] = gradient.norm
    return report


def _tensors_of(scaler: torch.amp.GradScaler) -> list[Tensor]:
    """The scaler's state, as it lies on the device: to read it there makes nobody wait."""
    return [value for value in vars(scaler).values() if isinstance(value, Tensor)]


def _clip(training: TrainingModule, clip_norm: float) -> Tensor:
    """Scales the gradient down to `clip_norm` where it is longer; returns its norm before."""
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
