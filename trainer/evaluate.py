"""Validation loss over the whole validation set, the same number for any number of ranks; also by source, kind and length.

A piece is what packing left of a document in one row. Losses are added without rounding, so the sums of the groups make the total.

    B rows of a batch   L tokens of a row   N targets of a batch   G groups   K integers of a group
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.files import plain
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.text_bytes import TextBytes, count_text_bytes
from trainer.config import TrainConfig
from trainer.data.batch import IGNORE, MicroBatch, micro_batch, share_of_rank
from trainer.distributed.group import Group
from trainer.exact import NUM_PARTS, add_exactly, rounded_sum
from trainer.model.attention import Backend
from trainer.model.forward import LossModule, empty_micro_batch, forward_pass
from trainer.model.loss import perplexity

__all__ = ["Evaluation", "EvaluationStopped", "Grouping", "Score", "Tally", "evaluate", "length_ranges"]

_TARGETS, _BYTES = NUM_PARTS, NUM_PARTS + 1
"""Columns of a tally behind those of the sum."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts some of the text that it was not trained on."""

    loss: float
    """Mean over the targets, in nats."""
    num_targets: int
    num_bytes: int = 0
    """UTF-8 bytes of the targets' text; 0 where they were not counted."""

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """`nats / ln 2 / bytes`, which models with different tokenizers can be compared by; none where bytes were not counted."""
        return self.loss * self.num_targets / math.log(2) / self.num_bytes if self.num_bytes else None

    def to_json(self) -> dict[str, Any]:
        """The numbers by name; one that is not finite is text, because JSON has no word for it."""
        numbers = {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}
        return {**plain(numbers), "targets": self.num_targets, "bytes": self.num_bytes}


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts text that it was not trained on."""

    loss: float
    """Mean over all targets, in nats."""
    num_rows: int
    num_targets: int
    num_bytes: int = 0
    """UTF-8 bytes of the targets' text; 0 where they were not counted."""
    by_source: Mapping[str, Score] = field(default_factory=dict)
    by_kind: Mapping[str, Score] = field(default_factory=dict)
    """By what the report of the preparation says of a source, such as `prose`, `web`, `code`, or `prose, code`."""
    by_length: Mapping[str, Score] = field(default_factory=dict)
    """By the length in tokens of the piece that a target belongs to, shortest first; see `length_ranges`."""

    @property
    def total(self) -> Score:
        """All of the text."""
        return Score(self.loss, self.num_targets, self.num_bytes)

    @property
    def perplexity(self) -> float:
        """`exp(loss)`, infinite where that overflows."""
        return self.total.perplexity

    @property
    def bits_per_byte(self) -> float | None:
        """See `Score`."""
        return self.total.bits_per_byte

    @property
    def groups(self) -> dict[str, Mapping[str, Score]]:
        """All groups, by what they are of."""
        return {"source": self.by_source, "kind": self.by_kind, "length": self.by_length}


@dataclass(frozen=True)
class Grouping:
    """What an evaluation tells apart, and how it counts bytes."""

    kinds: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    """The kind of each source, in the order of the manifest's sources."""
    text_bytes: TextBytes | None = None
    bos_id: int | None = None
    """The target behind it is the first of its text."""

    @staticmethod
    def of(manifest: Manifest, tokenizer: Tokenizer) -> Grouping:
        """The groups of prepared data. Takes some seconds for a vocabulary of 100,000 pieces."""
        reported = manifest.totals.get("sources", {})
        kinds = {name: reported.get(name, {}).get("kind") or "unknown" for name in manifest.sources}
        return Grouping(kinds, count_text_bytes(tokenizer), tokenizer.bos_id)


class EvaluationStopped(Exception):  # noqa: N818 - a request, no error
    """A rank was asked to stop before an evaluation was done."""


_PASSES_BETWEEN_VOTES = 8
"""A vote waits for what the device has to do."""
_UNDIVIDED = Grouping()
_Waiting = deque[tuple[Callable[[], NDArray[np.float32]], MicroBatch, NDArray[np.int64]]]
"""Batches with the numbers of their rows' sources, and a function that waits for the losses."""


class Tally:
    """What is added up over targets: exact losses, their number and their bytes, by source and by length."""

    def __init__(self, grouping: Grouping, row_length: int) -> None:
        self._grouping = grouping
        self._ranges = length_ranges(row_length)
        self._range_of_length = np.array([max(0, (length - 1).bit_length() - 1) for length in range(row_length + 1)])
        self.table_GK = np.zeros((len(grouping.kinds) + len(self._ranges), NUM_PARTS + 2), np.int64)
        """The sources, then the ranges of length: `NUM_PARTS` integers of the sum, targets, bytes."""

    @property
    def by_source(self) -> NDArray[np.int64]:
        """The rows of the sources."""
        return self.table_GK[: len(self._grouping.kinds)]

    @property
    def by_length(self) -> NDArray[np.int64]:
        """The rows of the ranges of length."""
        return self.table_GK[len(self._grouping.kinds) :]

    def add(self, losses_BL: NDArray[np.float32], batch: MicroBatch, sources_B: NDArray[np.int64]) -> None:
        """Adds the targets of a batch, each with its loss and the number of its row's source."""
        tokens_BL, targets_BL, positions_BL = (tensor.numpy() for tensor in (batch.tokens, batch.targets, batch.positions))
        is_target_BL = targets_BL != IGNORE
        targets_N, losses_N = targets_BL[is_target_BL], losses_BL[is_target_BL]
        sources_N = np.repeat(sources_B, is_target_BL.sum(axis=1))
        ranges_N = self._range_of_length[_piece_lengths(positions_BL)[is_target_BL]]
        bytes_N = self._bytes(targets_N, tokens_BL[is_target_BL])
        for rows_GK, groups_N in ((self.by_source, sources_N), (self.by_length, ranges_N)):
            sums_GE = np.zeros((len(rows_GK), NUM_PARTS), np.int64)
            add_exactly(sums_GE, groups_N, losses_N)
            rows_GK[:, :NUM_PARTS] += sums_GE
            np.add.at(rows_GK[:, _TARGETS], groups_N, 1)
            np.add.at(rows_GK[:, _BYTES], groups_N, bytes_N)

    def _bytes(self, targets_N: NDArray[np.int64], tokens_N: NDArray[np.int64]) -> NDArray[np.int64]:
        counts, bos_id = self._grouping.text_bytes, self._grouping.bos_id
        if counts is None:
            return np.zeros(len(targets_N), np.int64)
        return counts.count(targets_N, is_first_T=tokens_N == (-1 if bos_id is None else bos_id))

    def evaluation(self, num_rows: int) -> Evaluation:
        """The means. Groups without a target are left out."""
        total = _score(self.by_source.sum(axis=0))
        if self._grouping is _UNDIVIDED:
            return Evaluation(total.loss, num_rows, total.num_targets)
        kind_of_source = np.array(list(self._grouping.kinds.values()))
        kinds = list(dict.fromkeys(kind_of_source.tolist()))
        return Evaluation(
            total.loss,
            num_rows,
            total.num_targets,
            total.num_bytes,
            by_source=_scores(self._grouping.kinds, self.by_source),
            by_kind=_scores(kinds, [self.by_source[kind_of_source == kind].sum(axis=0) for kind in kinds]),
            by_length=_scores(self._ranges, self.by_length),
        )


@torch.no_grad()
def evaluate(
    loss: LossModule,
    backend: Backend,
    rows: Rows,
    config: TrainConfig,
    group: Group,
    after_batch: Callable[[], None] = lambda: None,
    grouping: Grouping = _UNDIVIDED,
    stop: Callable[[], bool] | None = None,
) -> Evaluation:
    """The mean loss over the validation rows, weighted by targets, and over the groups that are asked for.

    Each rank computes a run of the batches. Sums are integers, so neither their order nor the number of ranks changes a bit. The
    losses of one batch at a time are on the host, while the device computes the next. Where ranks share the weights, all make the
    same number of passes, some over an empty batch.

    Raises:
        EvaluationStopped: on every rank, where `stop` was true on one; the ranks ask each other every few passes, and at the end.
    """
    num_rows = min(len(rows), config.eval.max_rows or len(rows))
    chosen = np.arange(num_rows) * len(rows) // num_rows  # spread evenly: neighbours come from the same documents
    size = config.eval.micro or config.batch.micro_rows
    num_batches = -(-num_rows // size)
    own = share_of_rank(num_batches, group)
    num_passes = -(-num_batches // group.world_size)
    tally = Tally(grouping, rows.row_length)
    waiting: _Waiting = deque()
    was_training = loss.training
    loss.eval()
    try:
        for place in range(num_passes):
            if place < len(own):
                here = chosen[own[place] * size : (own[place] + 1) * size]
                batch = micro_batch(rows.read(here), with_bounds=backend == "varlen")
                sources_B = np.zeros(len(here), np.int64) if grouping is _UNDIVIDED else rows.source_ids(here)
                losses_BL = forward_pass(loss, batch, config, group.device, backend, by_row=True)
                waiting.append((_on_its_way(losses_BL), batch, sources_B))
                if len(waiting) > 1:
                    _take(waiting, tally)
                after_batch()
            elif config.parallel == "fsdp":
                forward_pass(loss, empty_micro_batch(size, rows.row_length, backend), config, group.device, backend, by_row=True)
            asks = (place + 1) % _PASSES_BETWEEN_VOTES == 0 or place + 1 == num_passes
            if stop is not None and asks and group.smallest(not stop()) == 0:
                raise EvaluationStopped
    finally:
        loss.train(was_training)
    while waiting:
        _take(waiting, tally)
    tally.table_GK = group.sum(torch.from_numpy(tally.table_GK).to(group.device)).cpu().numpy()
    return tally.evaluation(num_rows)


def length_ranges(row_length: int) -> list[str]:
    """The ranges of a piece's length, in tokens: `2`, `3-4`, `5-8`, … up to the length of a row."""
    highs = [min(2 << number, row_length) for number in range((row_length - 1).bit_length())]
    lows = [2, *(high + 1 for high in highs[:-1])]
    return [f"{low}-{high}" if low < high else str(high) for low, high in zip(lows, highs, strict=True)]


def _take(waiting: _Waiting, tally: Tally) -> None:
    arrived, batch, sources_B = waiting.popleft()
    tally.add(arrived(), batch, sources_B)


def _on_its_way(losses_BL: Tensor) -> Callable[[], NDArray[np.float32]]:
    """Starts the copy to the host; what is returned waits for it."""
    if not losses_BL.is_cuda:
        return losses_BL.numpy
    on_host = torch.empty_like(losses_BL, device="cpu", pin_memory=True)
    on_host.copy_(losses_BL, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> NDArray[np.float32]:
        arrived.synchronize()
        return on_host.numpy()

    return wait


def _piece_lengths(positions_BL: NDArray[np.int64]) -> NDArray[np.int64]:
    """The length of the piece that each position belongs to; padding is a piece too."""
    firsts = np.flatnonzero(positions_BL == 0)
    lengths = np.diff(firsts, append=positions_BL.size)
    return np.repeat(lengths, lengths).reshape(positions_BL.shape)


def _scores(names: Iterable[str], sums: Iterable[NDArray[np.int64]]) -> dict[str, Score]:
    """The score of each group that has a target."""
    scores = {name: _score(sums_K) for name, sums_K in zip(names, sums, strict=True)}
    return {name: score for name, score in scores.items() if score.num_targets}


def _score(sums_K: NDArray[np.int64]) -> Score:
    num_targets = int(sums_K[_TARGETS])
    loss = rounded_sum(sums_K[:NUM_PARTS]) / num_targets if num_targets else math.nan
    return Score(loss, num_targets, int(sums_K[_BYTES]))
