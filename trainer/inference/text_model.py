"""Writes text with a model: continues several prompts together, by one token of each prompt per step.

B rows   T new tokens of each row   V vocabulary

The model sees a window of a row's tokens, whose positions start at 0. The window begins at the start of the row and grows up to the
context. Then the oldest half is dropped, and the window grows again: see `window_start`. Its start depends on the length of the row
only, so the model gives the same distributions with and without a cache. A cache is filled again whenever the window moves.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from common.terminal import progress_shown
from data_pipeline.tokenizer import Tokenizer
from trainer.inference.sampling import GumbelNoise, Sampling, choose_tokens
from trainer.model.attention import make_layout
from trainer.model.decoder import Decoder
from trainer.model.layers import Attention, DecoderLayer
from trainer.model.linear import multiplied_packed, packed_weights

FinishReason = Literal["end", "stop", "length"]
"""end: the model ended the text; stop: a stop text or a stop token ended it; length: the text has `max_tokens` tokens."""

_INCOMPLETE = "\ufffd"


@dataclass(frozen=True)
class Continuation:
    prompt: str
    text: str  # the text without the prompt, and without the stop text or token that ended it
    tokens: tuple[int, ...]  # all drawn tokens without an end-of-text token or a stop token, but with the tokens of a stop text
    finish_reason: FinishReason

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "text": self.text, "tokens": len(self.tokens), "finish_reason": self.finish_reason}


@dataclass(frozen=True)
class Piece:
    """What one drawn token adds to a text: whole characters that cannot be the start of a stop text, perhaps none yet."""

    text: str
    finish_reason: FinishReason | None  # of the last piece


@dataclass(frozen=True)
class TextModel:
    model: nn.Module
    tokenizer: Tokenizer
    context: int
    use_cache: bool = True

    def stream(self, prompt: str, sampling: Sampling) -> Generator[str, None, None]:
        """Yield the continuation of a prompt in pieces."""
        yield from self.stream_after(self.prompt_tokens(prompt), sampling)

    def stream_after(self, tokens: Sequence[int], sampling: Sampling) -> Generator[str, None, None]:
        for piece in self.pieces_after(tokens, sampling):
            if piece.text:
                yield piece.text

    def pieces_after(self, tokens: Sequence[int], sampling: Sampling, row: int = 0) -> Generator[Piece, None, None]:
        """Yield a piece for each drawn token. `row` decides the noise, as the place in a list of prompts does."""
        writer = _Writer(self.tokenizer, "", tokens, sampling)
        for _ in self._continued([writer], sampling, row):
            yield Piece(writer.take(), writer.finish_reason)

    def complete(self, prompts: Sequence[str], sampling: Sampling, *, first_row: int = 0) -> list[Continuation]:
        """The noise of a row depends only on seed and number, so a list can be cut into batches without effect on the texts."""
        if not prompts:
            return []
        writers = [_Writer(self.tokenizer, prompt, self.prompt_tokens(prompt), sampling) for prompt in prompts]
        with progress_shown(f"writing {len(prompts)} text{'s' * (len(prompts) > 1)}", sampling.max_tokens, sys.stderr) as advance:
            for _ in self._continued(writers, sampling, first_row):
                advance()
        return [writer.continuation() for writer in writers]

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, after the beginning-of-text token if texts begin with it. There is at least one token."""
        return [*self.tokenizer.first_ids, *self.tokenizer.encode(prompt)] or [self.tokenizer.pad_id]

    def _continued(self, writers: Sequence[_Writer], sampling: Sampling, first_row: int) -> Iterator[None]:
        rows = TokenRows(
            *(self.model, [writer.start for writer in writers], self.tokenizer.vocab_size, sampling, self.context),
            use_cache=self.use_cache,
            first_row=first_row,
        )
        with evaluating(self.model):
            while rows.active:
                for row, token in rows.step():
                    writers[row].add(token)
                rows.finish(row for row in rows.active if writers[row].finish_reason is not None)
                yield


def window_start(num_tokens: int, context: int) -> int:
    """Return the position of the first token that the model sees. Beyond the context it moves once in half a context of tokens."""
    stride = max(1, context // 2)
    return max(0, -(-(num_tokens - context) // stride) * stride)


def can_cache(model: nn.Module) -> bool:
    """Return whether a model is our decoder, also with other feed-forward layers. Other models or attention may have no cache."""
    # compares methods, because FSDP replaces the class of a module
    return type(model) is Decoder and all(
        type(layer).forward is DecoderLayer.forward and type(layer.self_attn).forward is Attention.forward  # type: ignore[union-attr]
        for layer in model.model.layers
    )


class TokenRows:
    """Rows of tokens that grow by one token in each step until they are finished. The caller decides when a row ends.

    Ids from `vocab_size` on are padding of the vocabulary and are never drawn. `first_row` decides the noise of the rows.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        sampling: Sampling,
        context: int,
        *,
        use_cache: bool = True,
        first_row: int = 0,
    ) -> None:
        self.rows = [list(prompt) for prompt in prompts]  # prompt and drawn tokens of each row
        self.active = list(range(len(prompts)))
        self._sampling = sampling
        self._noise = GumbelNoise(sampling.seed, range(first_row, first_row + len(prompts)))
        self._seen_BV = torch.zeros(len(prompts), vocab_size, dtype=torch.bool) if sampling.repetition_penalty != 1 else None
        if self._seen_BV is not None:
            for number, row in enumerate(self.rows):
                self._seen_BV[number, row] = True
        self._vocab_size = vocab_size
        num_slots = min(context, max(len(row) for row in self.rows) + sampling.max_tokens)
        self._logits = (
            _Cached(model, context, len(prompts), num_slots) if use_cache and can_cache(model) else _Uncached(model, context)
        )

    @torch.no_grad()
    def step(self) -> list[tuple[int, int]]:
        logits_BV = self._logits.next([self.rows[row] for row in self.active])[:, : self._vocab_size].float().cpu()
        chosen_B = choose_tokens(logits_BV, self._seen_BV, self._noise, self._sampling)
        if self._seen_BV is not None:
            self._seen_BV[torch.arange(len(chosen_B)), chosen_B] = True
        drawn = list(zip(self.active, chosen_B.tolist(), strict=True))
        for row, token in drawn:
            self.rows[row].append(token)
        return drawn

    def finish(self, finished: Iterable[int]) -> None:
        ended = set(finished)
        places = [place for place, row in enumerate(self.active) if row not in ended]
        if len(places) == len(self.active):
            return
        self.active = [self.active[place] for place in places]
        self._noise.keep(places)
        self._logits.keep(places)
        if self._seen_BV is not None:
            self._seen_BV = self._seen_BV[places]


class _Uncached:
    """Computes whole windows in every step, row by row. This works with any model, and rows cannot affect each other."""

    def __init__(self, model: nn.Module, context: int) -> None:
        self._model, self._context = model, context

    def next(self, rows: Sequence[Sequence[int]]) -> Tensor:
        device, logits = next(self._model.parameters()).device, []
        for row in rows:
            window = row[window_start(len(row), self._context) :]
            tokens_1L = torch.tensor([window], dtype=torch.int64, device=device)
            layout = make_layout(torch.zeros_like(tokens_1L), torch.arange(len(window), device=device)[None])
            with uncompiled():
                logits.append(self._model(tokens_1L, layout)[0, -1])
        return torch.stack(logits)

    def keep(self, places: Sequence[int]) -> None:
        pass


class _Cached:
    """Computes the new token of each row only. It computes whole windows at the start and whenever a window has moved."""

    def __init__(self, model: nn.Module, context: int, num_rows: int, num_slots: int) -> None:
        assert isinstance(model, Decoder)
        self._model, self._context = model, context
        self._device = next(model.parameters()).device
        self._starts: list[int] = []
        self._cache = model.empty_cache(num_slots)
        self._packed = packed_weights(model, num_rows)

    def next(self, rows: Sequence[Sequence[int]]) -> Tensor:
        starts = [window_start(len(row), self._context) for row in rows]
        if starts != self._starts:
            self._starts = starts
            return self._extend([row[start:] for row, start in zip(rows, starts, strict=True)], [0] * len(rows))
        return self._extend([row[-1:] for row in rows], [len(row) - 1 - start for row, start in zip(rows, starts, strict=True)])

    def keep(self, places: Sequence[int]) -> None:
        self._starts = [self._starts[place] for place in places]
        for layer in self._cache:
            layer.keep(places)

    def _extend(self, new: Sequence[Sequence[int]], first_positions: Sequence[int]) -> Tensor:
        longest = max(map(len, new))
        tokens_BT = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in new], device=self._device)
        first_B1 = torch.tensor(first_positions, device=self._device)[:, None]
        positions_BT = first_B1 + torch.arange(longest, device=self._device)
        with uncompiled(), multiplied_packed(self._packed):
            hidden_BTD = self._model.extend(tokens_BT, positions_BT, max(first_positions) + longest, self._cache)
            last_B = torch.tensor([len(tokens) - 1 for tokens in new], device=self._device)
            last_BD = hidden_BTD[torch.arange(len(new), device=self._device), last_B]
            logits_BV: Tensor = self._model.lm_head(last_BD)
        return logits_BV


class _Writer:
    def __init__(self, tokenizer: Tokenizer, prompt: str, start: Sequence[int], sampling: Sampling) -> None:
        self.finish_reason: FinishReason | None = None
        self._tokenizer, self._prompt, self.start, self._sampling = tokenizer, prompt, list(start), sampling
        self._tokens: list[int] = []
        self._num_prompt_chars = len(tokenizer.decode(self.start))
        self._num_taken = 0
        self._end: int | None = None  # start of a stop text, in characters after the prompt

    def add(self, token: int) -> None:
        if token in self._tokenizer.end_ids:
            self.finish_reason = "end"
            self._tokens += [token] if self._tokenizer.decode([token]) else []  # an end that is a word stays in the text
        elif token in self._sampling.stop_tokens:
            self.finish_reason = "stop"
        else:
            self._tokens.append(token)
            text = self._text() if self._sampling.stop else ""
            found = [place for stop in self._sampling.stop if (place := text.find(stop)) >= 0]
            if found:
                self.finish_reason, self._end = "stop", min(found)
            elif len(self._tokens) == self._sampling.max_tokens:
                self.finish_reason = "length"

    def take(self) -> str:
        text = self._text()
        if self.finish_reason is None:
            if text.endswith(_INCOMPLETE):  # a character of several byte tokens is not complete yet
                return ""
            text = text[: len(text) - _num_held_back(text, self._sampling.stop)]
        piece = text[self._num_taken :]
        self._num_taken = max(self._num_taken, len(text))
        return piece

    def continuation(self) -> Continuation:
        assert self.finish_reason is not None
        return Continuation(self._prompt, self._text(), tuple(self._tokens), self.finish_reason)

    def _text(self) -> str:
        # Decodes the prompt too, because some tokenizers drop a space at the start of the text that they decode.
        return self._tokenizer.decode(self.start + self._tokens)[self._num_prompt_chars :][: self._end]


def _num_held_back(text: str, stops: Sequence[str]) -> int:
    longest = max((len(stop) - 1 for stop in stops), default=0)
    return next((size for size in range(min(longest, len(text)), 0, -1) if any(stop.startswith(text[-size:]) for stop in stops)), 0)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled layers without compilation, because they would be compiled again for each new length of a text."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
