"""The model learns to prefer the better answer of each pair.

p is the probability of an answer after its prompt under the trained model. `dpo` is the loss of Rafailov et al., "Direct Preference
Optimization" (2023), equation 7:

    -log sigmoid(margin),    margin = beta * ((log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)))

r is the probability under the reference: the initial weights, which stay as they are. With label smoothing e the loss is
-(1 - e) log sigmoid(margin) - e log sigmoid(-margin) (Mitchell, "A note on DPO with noisy preferences", 2023).

`orpo` is the loss of Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model" (2024, arXiv:2403.07691),
equations 1 to 7. It needs no reference:

    -log q(chosen) - odds_weight * log sigmoid(margin),    margin = log odds(chosen) - log odds(rejected)

q = p^(1 / tokens of the answer), and odds = q / (1 - q). The first term is the mean cross-entropy of the better answer's tokens.

Both answers of a pair are consecutive segments of one row. The pair has one target: the first token of its better answer. So the
loss is divided by the number of pairs, and the target's place says how long the prompt is.

    B rows   L tokens of a row   N pairs of a pass   E chunks   C positions of a chunk   D width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError, PreparedDataError
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dataset.shards import RowBatch, Rows
from trainer.config import TrainConfig
from trainer.context import RunContext
from trainer.data.batch import IGNORE
from trainer.finetuning.task import Kind, Task
from trainer.model.cost import FP32_BYTES
from trainer.model.decoder import Decoder, num_weights
from trainer.model.formula import soft_cap
from trainer.model.forward import EvalMetrics, PassInputs
from trainer.model.loss import cross_entropy_rows, default_chunk_tokens, equal_chunks
from trainer.model.memory_estimate import MemoryEstimate
from trainer.runs.events import MeasuresEvent
from trainer.runs.layout import RECORD

_UNITS = 1 << 24  # steps of a nat in the integer sums of an evaluation, which have the same bits for any number of ranks
_MOST_NATS = float(1 << 30)
_LARGEST_CHUNK = 1024
_LARGEST_LOG = -1e-6  # of a mean probability, whose odds are then a million to one


def _gather(config: TrainConfig, manifest: Manifest) -> Mapping[str, bytes]:
    if not manifest.has_pairs:
        raise ConfigError(
            f"{config.data}: it has no preference pairs, which objective = preference needs; run `prepare` with "
            "--records.prompt_field, --records.chosen_field and --records.rejected_field"
        )
    if config.preference.loss == "dpo" and config.init is None and not (config.run / RECORD).is_file():
        raise ConfigError(
            "objective = preference compares the model with its initial weights, and init is not set; name a run whose model "
            "answers prompts: --init RUN, or use preference.loss = orpo, which compares with no other model"
        )
    return {}


class PairRows(Rows):
    """The rows of preference pairs. Each pair has one target, at the last token of the prompt of its better answer."""

    def read(self, indices: NDArray[np.int64]) -> RowBatch:
        rows = super().read(indices)
        targets_BL = np.full(rows.tokens_BL.shape, IGNORE, np.int64)
        if not (rows.segments_BL >= 0).any():  # padding in place of a shard that was left out
            return replace(rows, targets_BL=targets_BL)
        if rows.has_loss_BL is None:
            raise PreparedDataError("a row of preference pairs has no loss mask; prepare the data again")
        for row, (segments_L, has_loss_L) in enumerate(zip(rows.segments_BL, rows.has_loss_BL, strict=True)):
            targets_L, tokens_L = targets_BL[row], rows.tokens_BL[row]
            for place in _ends_of_prompts(segments_L, has_loss_L, int(indices[row])):
                targets_L[place] = tokens_L[place + 1]
        return replace(rows, targets_BL=targets_BL)

    def num_sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return super().num_sequences(indices) // 2

    num_targets = num_sequences


def _ends_of_prompts(segments_L: NDArray[np.int32], has_loss_L: NDArray[np.bool_], row: int) -> NDArray[np.int64]:
    is_own_L = segments_L >= 0
    num_segments = int(segments_L.max(initial=-1)) + 1
    sizes = np.bincount(segments_L[is_own_L], minlength=num_segments)
    answers = np.bincount(segments_L[is_own_L & has_loss_L], minlength=num_segments)
    firsts = np.cumsum(sizes) - sizes
    prompts = sizes - answers
    begins_L = np.flatnonzero(is_own_L[1:] & has_loss_L[1:] & ~(has_loss_L[:-1] & (segments_L[:-1] == segments_L[1:]))) + 1
    is_right = num_segments % 2 == 0 and (prompts > 0).all() and np.array_equal(begins_L, firsts + prompts)
    if not is_right or not np.array_equal(prompts[::2], prompts[1::2]):
        raise PreparedDataError(f"row {row} does not consist of preference pairs; prepare the data again")
    return cast(NDArray[np.int64], (firsts + prompts - 1)[::2])


def pair_losses(margins_N: Tensor, label_smoothing: float) -> Tensor:
    losses_N = -functional.logsigmoid(margins_N)
    if label_smoothing:
        losses_N = (1 - label_smoothing) * losses_N - label_smoothing * functional.logsigmoid(-margins_N)
    return losses_N


class _Answers(NamedTuple):
    """The answers of a pass. Each tensor is (B, L)."""

    targets: Tensor  # the tokens of the answers; padding and prompts have none
    pairs: Tensor  # the number of each position's pair, below B * L; it differs between rows
    is_chosen: Tensor  # whether the position belongs to the better answer

    def sums(self, values_BL: Tensor) -> Tensor:
        """Return at each position the sum of the values of its pair, (B, L), fp32."""
        # `index_add` on one axis has the same bits in each run, also on a GPU.
        sums = torch.zeros(values_BL.numel(), dtype=torch.float32, device=values_BL.device)
        sums = sums.index_add(0, self.pairs.flatten(), values_BL.float().flatten())
        return sums[self.pairs.flatten()].view_as(values_BL)


_PairLoss = Callable[[nn.Module, PassInputs], tuple[Tensor, Tensor]]
"""Returns loss and margin of each pair at its target, (B, L), fp32. Other positions have finite numbers without a meaning."""


class _Dpo:
    def __init__(self, beta: float, label_smoothing: float) -> None:
        self._beta, self._smoothing = beta, label_smoothing
        self._reference: list[Decoder] = []

    def hold(self, model: nn.Module) -> None:
        assert isinstance(model, Decoder)
        self._reference = [model.eval().requires_grad_(requires_grad=False)]

    def __call__(self, model: nn.Module, inputs: PassInputs) -> tuple[Tensor, Tensor]:
        [reference] = self._reference  # the trainer hands it over before the first pass
        answers = _answers(inputs)
        with torch.no_grad():
            plain = inputs._replace(layout=inputs.layout._replace(keys_B=None))  # no dropout
            expected_BL = _log_probabilities(reference, plain, answers.targets)
        ratios_BL = _log_probabilities(model, inputs, answers.targets) - expected_BL
        margins_BL = self._beta * answers.sums(torch.where(answers.is_chosen, ratios_BL, -ratios_BL))
        return pair_losses(margins_BL, self._smoothing), margins_BL


def _orpo(model: nn.Module, inputs: PassInputs, odds_weight: float) -> tuple[Tensor, Tensor]:
    answers = _answers(inputs)
    logs_BL, has_target_BL = _log_probabilities(model, inputs, answers.targets), answers.targets != IGNORE
    chosen_BL, rejected_BL = (
        answers.sums(torch.where(mine_BL, logs_BL, 0.0)) / answers.sums(mine_BL & has_target_BL).clamp_min(1)
        for mine_BL in (answers.is_chosen, ~answers.is_chosen)
    )
    margins_BL = log_odds(chosen_BL) - log_odds(rejected_BL)
    return odds_weight * pair_losses(margins_BL, 0.0) - chosen_BL, margins_BL


def log_odds(logs: Tensor) -> Tensor:
    """Return log(q / (1 - q)) for log q. A probability that rounds to 1 has finite odds and no gradient."""
    logs = logs.clamp_max(_LARGEST_LOG)
    return logs - (-torch.expm1(logs)).log()


def _sums(pair_loss: _PairLoss, model: nn.Module, inputs: PassInputs) -> Tensor:
    """Return the sum of the losses of all pairs, the number of those whose better answer wins, and the sum of margins, fp32."""
    losses_BL, margins_BL = pair_loss(model, inputs)
    numbers_BLK = torch.stack([losses_BL, (margins_BL.detach() > 0).float(), margins_BL.detach()], -1)
    return torch.where((inputs.targets == IGNORE)[..., None], 0.0, numbers_BLK).sum((0, 1))


def _score(pair_loss: _PairLoss, model: nn.Module, inputs: PassInputs) -> Tensor:
    return torch.stack(pair_loss(model, inputs), -1)


def _answers(inputs: PassInputs) -> _Answers:
    positions_BL = inputs.layout.positions_BL
    num_rows, length = positions_BL.shape
    # The padding at the end of a row is the last segment, and begins with position 0 too.
    segments_BL = (positions_BL == 0).cumsum(1) - 1
    in_row_BL = segments_BL // 2
    rows_B1 = torch.arange(num_rows, device=positions_BL.device)[:, None] * length
    pairs_BL = rows_B1 + in_row_BL
    prompts = torch.zeros(num_rows * length, dtype=torch.int64, device=positions_BL.device)
    has_target_BL = inputs.targets != IGNORE
    # Each pair has one target, so each sum has one term that is not 0.
    prompts = prompts.index_add(0, pairs_BL.flatten(), torch.where(has_target_BL, positions_BL + 1, 0).flatten())
    prompts_BL = prompts[pairs_BL.flatten()].view_as(pairs_BL)  # 0 for the padding
    is_next_BL = functional.pad(positions_BL[:, 1:] >= prompts_BL[:, 1:], (0, 1), value=False)
    continues_BL = functional.pad(positions_BL[:, 1:] > 0, (0, 1), value=False)
    targets_BL = torch.where(is_next_BL & continues_BL & (prompts_BL > 0), inputs.tokens.roll(-1, 1), IGNORE)
    return _Answers(targets_BL, pairs_BL, segments_BL % 2 == 0)


def _log_probabilities(model: nn.Module, inputs: PassInputs, targets_BL: Tensor) -> Tensor:
    """Return the log-probability of each target, (B, L), fp32, 0 without one. Chunks have one shape, so rows are independent."""
    assert isinstance(model, Decoder)
    hidden_BLD, weight_VD = model.hidden(inputs.tokens, inputs.layout), model.lm_head.weight
    losses_of = partial(_chunk_losses, softcap=model.lm_head.softcap)
    size = min(default_chunk_tokens(weight_VD.shape[0], hidden_BLD.device.type), _LARGEST_CHUNK)
    losses = [
        cast(Tensor, checkpoint(losses_of, hidden_CD, weight_VD, targets_C, use_reentrant=False, preserve_rng_state=False))
        for hidden_CD, targets_C in equal_chunks(hidden_BLD, targets_BL, size)
    ]
    return -torch.cat(losses)[: targets_BL.numel()].view_as(targets_BL)


def _chunk_losses(hidden_CD: Tensor, weight_VD: Tensor, targets_C: Tensor, *, softcap: float) -> Tensor:
    return cross_entropy_rows(soft_cap(functional.linear(hidden_CD, weight_VD), softcap)[None], targets_C[None])[0]


def _count(facts_NK: NDArray[np.float32], targets_N: NDArray[np.int64]) -> NDArray[np.int64]:
    margins_N = facts_NK[:, :1].ravel().astype(np.float64)
    units = np.rint(np.clip(np.nan_to_num(margins_N), -_MOST_NATS, _MOST_NATS) * _UNITS).astype(np.int64)
    return np.array([len(targets_N), int((margins_N > 0).sum()), int(units.sum())], np.int64)


def _event(step: int, table: NDArray[np.int64]) -> MeasuresEvent:
    pairs, wins, units = table.tolist()
    return MeasuresEvent(step, {"accuracy": wins / max(pairs, 1), "margin": units / _UNITS / max(pairs, 1)})


def _lines(event: MeasuresEvent) -> str:
    return f"pairs: accuracy {event.values['accuracy']:.3f}, margin {event.values['margin']:.4f} nats"


def _memory(estimate: MemoryEstimate, context: RunContext) -> MemoryEstimate:
    return replace(estimate, frozen=FP32_BYTES * num_weights(context.config.model, context.manifest.vocab_size))


def _make(config: TrainConfig, _files: Mapping[str, bytes]) -> Task:
    settings = config.preference
    dpo = _Dpo(settings.beta, settings.label_smoothing) if settings.loss == "dpo" else None
    pair_loss = dpo or partial(_orpo, odds_weight=settings.odds_weight)
    return Task(
        rows=PairRows,
        sums=lambda _device: partial(_sums, pair_loss),
        step_metrics=("accuracy", "margin"),
        measures=EvalMetrics(partial(_score, pair_loss), _count, _event, _lines),
        comparable=False,
        reference=None if dpo is None else dpo.hold,
        memory=None if dpo is None else _memory,
    )


KIND = Kind(_gather, _make)
