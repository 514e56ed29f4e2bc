"""Text from a model, one token after the other.

L tokens so far   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from data_pipeline.tokenizer import Tokenizer
from trainer.attention import make_layout

__all__ = ["Sampling", "generate", "generate_tokens", "sample_token"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_tokens: int = 128
    temperature: float = 1.0
    """0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens that together have this probability."""
    seed: int = 0


def sample_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token from fp32 logits; ties and order do not depend on anything but the logits and the generator."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    sorted_V, order_V = (logits_V / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        sorted_V, order_V = sorted_V[: sampling.top_k], order_V[: sampling.top_k]
    probabilities = sorted_V.softmax(dim=0)
    before = (
        probabilities.cumsum(dim=0) - probabilities
    )  # nucleus sampling (Holtzman et al., 2020) keeps the token that crosses top_p
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return int(order_V[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate_tokens(
    model: nn.Module, prompt: list[int], vocab_size: int, stop: int | None, sampling: Sampling, context: int
) -> Iterator[int]:
    """Yields the tokens that continue `prompt` until `stop` (if any) or the limit; the model sees the last `context` of them."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(sampling.max_tokens):
        window_1L = torch.tensor([tokens[-context:]], device=device)
        positions_1L = torch.arange(window_1L.shape[1], device=device)[None]
        layout = make_layout(torch.zeros_like(window_1L), positions_1L)
        logits_V = model(window_1L, layout)[0, -1, :vocab_size].float().cpu()
        token = sample_token(logits_V, sampling, generator)
        if token == stop:
            return
        tokens.append(token)
        yield token


def generate(model: nn.Module, tokenizer: Tokenizer, prompt: str, sampling: Sampling, context: int) -> Iterator[str]:
    """Yields the continuation of `prompt` in pieces of text, as soon as each is whole."""
    training = model.training
    model.eval()
    start = [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(prompt)] or [tokenizer.pad_id]
    produced: list[int] = []
    shown = ""
    for token in generate_tokens(model, start, tokenizer.vocab_size, tokenizer.eos_id, sampling, context):
        produced.append(token)
        text = tokenizer.decode(produced)
        if not text.endswith("\ufffd"):  # a character of several byte tokens is not complete yet
            yield text[len(shown) :]
            shown = text
    if rest := tokenizer.decode(produced)[len(shown) :]:
        yield rest
    model.train(training)
