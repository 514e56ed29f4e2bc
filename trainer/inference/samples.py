"""The texts that a run writes at each evaluation, from the same prompts each time, and their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer
from trainer.config import EvalConfig, TrainConfig
from trainer.inference.likelihood import cut_windows, num_common, score_windows
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Continuation, TextModel, evaluating, uncompiled
from trainer.inference.text_scores import score_texts
from trainer.runs.events import perplexity

_NUM_BEGINNINGS = 4
_BEGINNING_TOKENS = 16
_WINDOWS_AT_ONCE = 8
_INCOMPLETE = "\ufffd"


def prompts_of(settings: EvalConfig, rows: Rows, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the prompts of a run: `eval.prompts` if it is set, else `eval.prompt` and the beginnings of four validation rows.

    The rows are spread evenly over the validation set. A beginning is the first 16 tokens of a row, or its first document if that
    is shorter. There are no prompts if `eval.sample_tokens` is 0.
    """
    if not settings.sample_tokens:
        return ()
    if settings.prompts:
        return settings.prompts
    texts = [settings.prompt]
    num_rows = min(_NUM_BEGINNINGS, len(rows))
    batch = rows.read(np.arange(num_rows) * len(rows) // num_rows)
    for tokens_L, segments_L in zip(batch.tokens_BL, batch.segments_BL, strict=True):
        size = min(_BEGINNING_TOKENS, int((segments_L == 0).sum()))
        texts.append(tokenizer.decode(tokens_L[:size].tolist()).rstrip(_INCOMPLETE))
    return tuple(dict.fromkeys(filter(None, texts))) or ("",)


def sample_and_score(
    source: TextModel, prompts: Sequence[str], sampling: Sampling, config: TrainConfig
) -> tuple[list[Continuation], dict[str, float | None] | None]:
    """Continue all prompts in one batch, and score the texts. If the weights are sharded, all ranks must call this."""
    written = source.complete(prompts, sampling)
    if not config.eval.score:
        return written, None
    return written, score_texts([one.text for one in written], text_perplexity(source, config, written))


def text_perplexity(reference: TextModel, config: TrainConfig, written: Sequence[Continuation]) -> float | None:
    """Return `exp` of the mean loss of the written tokens under a model, each after its prompt and the text before it.

    A text is cut into the reference's tokens together with its prompt. Tokens that the prompt alone has too are not counted.
    Results of references with different tokenizers cannot be compared. None if there are no tokens, NaN if a loss is NaN.
    """
    windows = []
    for one in written:
        tokens, given = (reference.prompt_tokens(text) for text in (one.prompt + one.text, one.prompt))
        first = max(1, num_common(tokens, given))
        windows += cut_windows(tokens[:first], tokens[first:], reference.context)
    num_tokens = sum(len(window.targets) for window in windows)
    if not num_tokens:
        return None
    with evaluating(reference.model), uncompiled():
        scored = score_windows(reference.model, windows, reference.tokenizer.vocab_size, config, _WINDOWS_AT_ONCE)
    return perplexity(math.fsum(likelihood.nats for likelihood in scored) / num_tokens)
