"""The likelihood of given tokens under a model, in windows no longer than its context, batched by length.

B windows of a batch   L tokens of the longest window   S scored tokens of a batch   V vocabulary, padded
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from trainer.config import TrainConfig
from trainer.model.attention import make_layout
from trainer.model.decoder import Decoder
from trainer.model.forward import autocast

_POSITIONS = 256  # number of positions whose fp32 logits exist at one time, if the model is a `Decoder`


@dataclass(frozen=True)
class ScoredWindow:
    tokens: tuple[int, ...]
    targets: tuple[int, ...]  # next token after each of the last `len(targets)` tokens


@dataclass(frozen=True)
class Likelihood:
    nats: float  # Sum of `-log p` of the targets. The softmax is over all pieces of the padded vocabulary, as in training.
    is_greedy: bool  # every target is the likeliest token at its position


def cut_windows(before: Sequence[int], scored: Sequence[int], context: int) -> list[ScoredWindow]:
    """Return windows of at most `context` tokens in which each token of `scored` is a target exactly once.

    There is at least one token `before` them. Tokens that do not fit are cut off from the left. Each further window begins with the
    last token of the window before, and the last one has as much context as fits, as in `loglikelihood_rolling` of
    lm-evaluation-harness.
    """
    tokens = (*before, *scored)
    windows = []
    for done in range(0, len(scored), context):
        end = min(done + context, len(scored))
        last = len(before) + end - 1
        windows.append(ScoredWindow(tokens[max(0, last - context) : last], tokens[len(before) + done : len(before) + end]))
    return windows


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


@torch.no_grad()
def score_windows(
    model: nn.Module, windows: Sequence[ScoredWindow], vocab_size: int, config: TrainConfig, batch_size: int
) -> list[Likelihood]:
    """Return the likelihood of each window's targets, in the order of the windows.

    Windows of similar length are computed together, longest first, padded on the right, where no token sees the padding. The last
    bits of a likelihood may depend on the batch, because matrix products of another shape add in another order. With a `batch_size`
    of 1 they depend on the window only.
    """
    by_length = sorted(range(len(windows)), key=lambda number: -len(windows[number].tokens))
    likelihoods: dict[int, Likelihood] = {}
    for start in range(0, len(by_length), batch_size):
        numbers = by_length[start : start + batch_size]
        scored = _score([windows[number] for number in numbers], model, vocab_size, config)
        likelihoods |= dict(zip(numbers, scored, strict=True))
    return [likelihoods[number] for number in range(len(windows))]


def _score(windows: Sequence[ScoredWindow], model: nn.Module, vocab_size: int, config: TrainConfig) -> list[Likelihood]:
    device = next(model.parameters()).device
    length = max(len(window.tokens) for window in windows)
    tokens_BL = torch.zeros(len(windows), length, dtype=torch.int64)
    is_scored_BL = torch.zeros(len(windows), length, dtype=torch.bool)
    for row, window in enumerate(windows):
        size = len(window.tokens)
        tokens_BL[row, :size] = torch.tensor(window.tokens)
        is_scored_BL[row, size - len(window.targets) : size] = True
    targets_S = torch.tensor([target for window in windows for target in window.targets], device=device)
    positions_BL = torch.arange(length).expand(len(windows), -1).contiguous()
    # One segment for the whole row is enough, because padding comes last and no token sees it.
    layout = make_layout(torch.zeros_like(tokens_BL, device=device), positions_BL.to(device))
    with autocast(config, device):
        decoder = model if isinstance(model, Decoder) else None
        states = (model if decoder is None else decoder.hidden)(tokens_BL.to(device), layout)[is_scored_BL.to(device)]
        nats, greedy = [], []
        for states_C, targets_C in zip(torch.split(states, _POSITIONS), torch.split(targets_S, _POSITIONS), strict=True):
            logits_CV = (states_C if decoder is None else decoder.lm_head(states_C)).float()
            nats.append(-logits_CV.log_softmax(dim=1).gather(1, targets_C[:, None]).squeeze(1))
            greedy.append(logits_CV[:, :vocab_size].argmax(dim=1) == targets_C)
    nats_S, greedy_S = torch.cat(nats).cpu(), torch.cat(greedy).cpu()
    counts = [len(window.targets) for window in windows]
    return [
        Likelihood(math.fsum(of_window.tolist()), bool(is_greedy.all()))
        for of_window, is_greedy in zip(torch.split(nats_S, counts), torch.split(greedy_S, counts), strict=True)
    ]
