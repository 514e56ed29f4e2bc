"""Validation loss over the whole validation set and by source, kind and length, with the same bits for any number of ranks.

Kind and length are those of the target's whole document, of which packing may have placed only a piece in the row. Losses are
added without rounding, so the sums of the groups are exactly the total.

    B rows of a batch   L tokens of a row   N targets of a batch   G groups   K integers of a group
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.terminal import progress_shown
from data_pipeline.dataset.shards import Rows
from trainer.context import RunContext
from trainer.data.batch import IGNORE, MicroBatch, micro_batch, share_of_rank
from trainer.evaluation.tally import UNDIVIDED, Evaluation, Grouping, Tally
from trainer.model.forward import EvalMetrics, LossModule, empty_micro_batch, forward_pass
from trainer.model.parameters import to_host


class EvaluationStopped(Exception):  # noqa: N818 - a request, no error
    """A rank was asked to stop before the evaluation was complete."""


_PASSES_BETWEEN_VOTES = 8  # a vote waits until the device has finished its work, so not every pass has one


@torch.no_grad()
def evaluate(
    loss: LossModule,
    context: RunContext,
    rows: Rows,
    after_batch: Callable[[], None] = lambda: None,
    grouping: Grouping = UNDIVIDED,
    stop: Callable[[], bool] | None = None,
    measures: EvalMetrics | None = None,
) -> Evaluation:
    """Return the mean loss over the targets of the validation rows, in total and for each group of `grouping`.

    Sums are integers, so neither their order nor the number of ranks changes a bit. The host adds up the losses of one batch while
    the device computes the next. Under FSDP all ranks make the same number of passes, some of them over an empty batch.

    Raises EvaluationStopped on every rank if `stop` returned true on one. The ranks vote every few passes and at the end.
    """
    config, group, backend = context.config, context.group, context.backend
    num_rows = min(len(rows), config.eval.max_rows or len(rows))
    chosen = np.arange(num_rows) * len(rows) // num_rows  # spread evenly: neighbours come from the same documents
    size = config.eval.micro_batch_size or config.batch.micro_rows
    num_batches = -(-num_rows // size)
    own = share_of_rank(num_batches, group)
    num_passes = -(-num_batches // group.world_size)
    tally = Tally(grouping, rows.row_length)
    table = None if measures is None else measures.count(np.empty((0, 0), np.float32), np.empty(0, np.int64))
    waiting: deque[tuple[Callable[[], Tensor], MicroBatch, NDArray[np.int64], list[NDArray[np.uint64]]]] = deque()

    def take() -> None:
        nonlocal table
        arrived, batch, sources_B, ids = waiting.popleft()
        scores = arrived().numpy()  # (B, L), or with measures (B, L, 1 + K)
        if measures is not None and table is not None:
            is_target_BL = batch.targets.numpy() != IGNORE
            table = table + measures.count(scores[..., 1:][is_target_BL], batch.targets.numpy()[is_target_BL])
            scores = np.ascontiguousarray(scores[..., 0])
        tally.add(scores, batch, sources_B, ids)

    was_training = loss.training
    loss.eval()
    shown = progress_shown("validation", num_passes, sys.stderr) if group.is_main else nullcontext(lambda: None)
    try:
        with shown as advance:
            for place in range(num_passes):
                if place < len(own):
                    here = chosen[own[place] * size : (own[place] + 1) * size]
                    batch = micro_batch(rows.read(here), with_bounds=backend == "varlen")
                    sources_B = np.zeros(len(here), np.int64) if grouping is UNDIVIDED else rows.source_ids(here)
                    losses_BL = forward_pass(loss, batch, config, group.device, backend, by_row=True)
                    ids = [] if grouping.documents is None else [rows.document_ids(number) for number in here.tolist()]
                    waiting.append((to_host(losses_BL), batch, sources_B, ids))
                    if len(waiting) > 1:
                        take()
                    after_batch()
                elif config.parallel == "fsdp":
                    forward_pass(
                        loss, empty_micro_batch(size, rows.row_length, backend), config, group.device, backend, by_row=True
                    )
                asks = (place + 1) % _PASSES_BETWEEN_VOTES == 0 or place + 1 == num_passes
                if stop is not None and asks and group.smallest(not stop()) == 0:
                    raise EvaluationStopped
                advance()
    finally:
        loss.train(was_training)
    while waiting:
        take()
    tally.table_GK[:] = group.sum(torch.from_numpy(tally.table_GK).to(group.device)).cpu().numpy()
    evaluation = tally.evaluation(num_rows)
    if measures is None or table is None:
        return evaluation
    total = group.sum(torch.from_numpy(table).to(group.device)).cpu().numpy()
    return replace(evaluation, measured=lambda step: measures.event(step, total))
