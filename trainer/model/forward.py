from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.config import LossConfig, TrainConfig
from trainer.data.batch import MicroBatch, blank_micro_batch
from trainer.machine.memory import is_out_of_memory, release_memory
from trainer.model.attention import Backend, Layout, make_layout
from trainer.model.decoder import Decoder
from trainer.model.dropout import row_keys
from trainer.model.linear import PRODUCTS
from trainer.model.loss import cross_entropy_rows, cross_entropy_sum, linear_cross_entropy_rows, linear_cross_entropy_sum
from trainer.model.operators import has_kernels
from trainer.runs.events import MeasuresEvent

LossFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps logits (B, L, V), targets (B, L) and weights (B, L) or None to the weighted sum over all targets, a fp32 scalar."""
_log = logging.getLogger(__name__)
_AUTOCAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "float8": torch.bfloat16}


class PassInputs(NamedTuple):
    """The tensors of a micro-batch in a forward pass."""

    tokens: Tensor
    """int64 ids, (B, L)."""
    layout: Layout
    """The documents of the rows, for `Decoder.hidden` and `attend`."""
    targets: Tensor
    """(B, L), int64 ids of the next tokens, IGNORE at positions without a target."""
    weights: Tensor | None
    """(B, L), fp32 weight of each target, or None if all weights are 1."""


@dataclass(frozen=True)
class EvalMetrics:
    """What an objective of fine-tuning measures in an evaluation besides the loss.

    B rows   L tokens of a row   N targets of a batch   K facts of a target
    """

    score: Callable[[nn.Module, PassInputs], Tensor]
    """`(model, inputs)` returns fp32 numbers for each position, (B, L, 1 + K): the loss, which counts at targets, and K facts. The
    result of a row must not depend on the other rows of the pass."""
    count: Callable[[NDArray[np.float32], NDArray[np.int64]], NDArray[np.int64]]
    """`(facts_NK, targets_N)` returns a table of integers, always with the same shape. The tables of all batches and ranks are
    added, so the sum has the same bits for any number of ranks. The first call has no target."""
    event: Callable[[int, NDArray[np.int64]], MeasuresEvent]  # `(step, table)` returns the event for the summed table
    lines: Callable[[MeasuresEvent], str]  # returns the event as text for `trainer evaluate`


class CustomPass(NamedTuple):
    """A forward pass of an extension or objective: `function(model, inputs, *tensors)`."""

    function: Callable[..., Any]
    tensors: tuple[Tensor, ...] = ()


class LossModule(nn.Module):
    """The model and its loss in one forward pass. This module is compiled, and DDP and FSDP wrap it.

    `custom_loss` replaces the loss of a training pass, and `custom_score` (`EvalMetrics.score`) the result of an evaluation's pass.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: LossConfig,
        custom_loss: LossFunction | None = None,
        custom_score: Callable[[nn.Module, PassInputs], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        self.custom_loss = custom_loss
        self.custom_score = custom_score
        self.most_rows: int | None = None
        """Most rows in one forward pass of an evaluation, because more rows ran out of memory; None: no limit."""

    def forward(
        self,
        tokens_BL: Tensor,
        layout: Layout,
        targets_BL: Tensor,
        weights_BL: Tensor | None = None,
        *,
        by_row: bool = False,
        custom: CustomPass | None = None,
    ) -> Any:
        """Return the sum of the loss over all targets, a fp32 scalar, or with `by_row` each position's cross-entropy, (B, L).

        With `custom` it returns the result of the function in it, and with `by_row` that of `custom_score` if there is one.
        """
        model = self.model
        if custom is not None:
            return custom.function(model, PassInputs(tokens_BL, layout, targets_BL, weights_BL), *custom.tensors)
        if by_row and self.custom_score is not None:
            return self.custom_score(model, PassInputs(tokens_BL, layout, targets_BL, weights_BL))
        if isinstance(model, Decoder) and (by_row or self.custom_loss is None):  # no logits of the whole micro-batch
            hidden_BLD, weight_VD, softcap = model.hidden(tokens_BL, layout), model.lm_head.weight, model.lm_head.softcap
            if by_row:
                return linear_cross_entropy_rows(hidden_BLD, weight_VD, targets_BL, softcap=softcap)
            return linear_cross_entropy_sum(hidden_BLD, weight_VD, targets_BL, self.settings, weights_BL, softcap=softcap)
        logits_BLV = model(tokens_BL, layout)
        if by_row:
            return cross_entropy_rows(logits_BLV, targets_BL)
        return (self.custom_loss or partial(cross_entropy_sum, settings=self.settings))(logits_BLV, targets_BL, weights_BL)


def empty_micro_batch(num_rows: int, row_length: int, backend: Backend, *, with_weights: bool = False) -> MicroBatch:
    return blank_micro_batch(num_rows, row_length, with_weights=with_weights, with_bounds=backend == "varlen")


def forward_pass(
    module: nn.Module,
    rows: MicroBatch,
    config: TrainConfig,
    device: torch.device,
    backend: Backend,
    *,
    by_row: bool = False,
    keys_B: Tensor | None = None,
    custom: CustomPass | None = None,
) -> Any:
    """Return the result of `LossModule.forward` for a micro-batch, in the run's precision.

    With `by_row` there is no dropout, and a micro-batch that runs out of memory is halved until its parts fit; the result of a row
    does not depend on this. Under `parallel = fsdp` it is not halved, because all ranks must make the same number of passes.
    """
    if by_row and config.parallel != "fsdp" and isinstance(module, LossModule):
        return _pass_in_parts(module, rows, config, device, backend)
    if config.has_dropout and not by_row and keys_B is None:
        keys_B = row_keys(config.seed, 0, 0, len(rows.tokens), device)
    return _pass(module, rows, config, device, backend, keys_B=keys_B, by_row=by_row, custom=custom)


def _pass(
    module: nn.Module,
    rows: MicroBatch,
    config: TrainConfig,
    device: torch.device,
    backend: Backend,
    *,
    keys_B: Tensor | None = None,
    **options: Any,
) -> Any:
    micro = rows.to(device)
    if micro.bounds is not None and config.compiles(device.type):
        # Otherwise a micro-batch with more pieces than all before it would compile the model again.
        torch._dynamo.maybe_mark_dynamic(micro.bounds, 0)
    model = config.model
    layout = make_layout(
        *(micro.segments, micro.positions, backend, micro.bounds),
        keys_B=keys_B,
        dropout=model.attention_dropout,
        window=model.window,
    )
    with autocast(config, device):
        return module(micro.tokens, layout, micro.targets, micro.weights, **options)


def _pass_in_parts(loss: LossModule, rows: MicroBatch, config: TrainConfig, device: torch.device, backend: Backend) -> Tensor:
    num_rows = len(rows.tokens)
    if loss.most_rows is None or num_rows <= loss.most_rows:
        try:
            return cast(Tensor, _pass(loss, rows, config, device, backend, by_row=True))
        except Exception as error:
            if num_rows == 1 or not is_out_of_memory(error):
                raise
            _log.warning("an evaluation ran out of memory with %d rows in a pass; from now on a pass takes half of them", num_rows)
            loss.most_rows = num_rows // 2
    release_memory()  # after the handler, because the error keeps the tensors of the failed pass alive
    return torch.cat([_pass_in_parts(loss, half, config, device, backend) for half in rows.halves()])


def own_kernels(config: TrainConfig, device: torch.device) -> str | None:
    """Return which kernels this project chooses or has itself for a run, because the bits of the run depend on it; None: none.

    Runs of older versions in fp32 on a CPU have no such entry, because they took MKL for the gradients of weights everywhere.
    """
    all_compiled = config.compile == "on" and config.parallel != "fsdp"
    if device.type == "cpu" and config.number_format == "fp32" and not all_compiled:
        return f"products by {PRODUCTS}"
    if config.number_format == "fp32" or not has_kernels(device.type, _AUTOCAST_TYPES[config.number_format]):
        return None
    return "embedding, loss, norm and rotation"


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast | nullcontext[None]:
    if config.number_format == "fp32":
        return nullcontext()
    return torch.autocast(device.type, _AUTOCAST_TYPES[config.number_format])
