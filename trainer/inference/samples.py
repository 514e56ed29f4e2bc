"""The texts that a run writes at each evaluation, always from the same prompts, and their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import Tokenizer
from trainer.config import EvalConfig, TrainConfig
from trainer.inference.likelihood import cut_windows, num_common, score_windows
from trainer.inference.text_model import Continuation, Sampling, TextModel, evaluating, uncompiled
from trainer.inference.text_scores import Scores, score_texts
from trainer.model import loss

__all__ = ["perplexity", "prompts_of", "sample_and_score"]

_NUM_BEGINNINGS = 4
_BEGINNING_TOKENS = 16
_WINDOWS_AT_ONCE = 8
_INCOMPLETE = "\ufffd"


def prompts_of(settings: EvalConfig, rows: Rows, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The prompts of a run: `eval.prompts`, else `eval.prompt`, if there is one, and the beginnings of four validation rows.

    The rows are spread evenly over the validation set, and of each the first 16 tokens are taken, or those of its first document if
    they are fewer: the same for all runs on the same data. None if `eval.sample_tokens` is 0.

    Raises:
        PreparedDataError: a row cannot be read.
    """
    if not settings.sample_tokens:
        return ()
    if settings.prompts:
        return settings.prompts
    own = [settings.prompt] if settings.prompt else []
    return tuple(dict.fromkeys([*own, *_beginnings(rows, tokenizer)])) or ("",)


def sample_and_score(
    source: TextModel, prompts: Sequence[str], sampling: Sampling, config: TrainConfig
) -> tuple[list[Continuation], Scores | None]:
    """Continues all prompts in one batch, and scores what was written, with the model itself as the reference of perplexity.

    Where ranks share the weights, all of them call this, and make the same forward passes.

    Args:
        source: the model that is trained.
        prompts: from `prompts_of`.
        sampling: the settings.
        config: of the run.
    """
    written = source.complete(prompts, sampling)
    if not config.eval.score:
        return written, None
    return written, score_texts([one.text for one in written], perplexity(source, config, written))


def perplexity(reference: TextModel, config: TrainConfig, written: Sequence[Continuation]) -> float | None:
    """`exp` of the mean loss of the written texts' tokens under a model, each given its prompt and what was written before it.

    Texts are cut into the reference's tokens together with their prompts; those that the prompt has by itself do not count. Numbers
    of references with different tokenizers cannot be compared. None where nothing was written, NaN where a loss is.

    Args:
        reference: the model that is asked.
        config: the settings of its run, for its precision.
        written: prompts and texts.
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
    return loss.perplexity(math.fsum(likelihood.nats for likelihood in scored) / num_tokens)


def _beginnings(rows: Rows, tokenizer: Tokenizer) -> list[str]:
    num_rows = min(_NUM_BEGINNINGS, len(rows))
    batch = rows.read(np.arange(num_rows) * len(rows) // num_rows)
    texts = []
    for tokens_L, segments_L in zip(batch.tokens_BL, batch.segments_BL, strict=True):
        size = min(_BEGINNING_TOKENS, int((segments_L == 0).sum()))
        texts.append(tokenizer.decode(tokens_L[:size].tolist()).rstrip(_INCOMPLETE))
    return [text for text in texts if text]
