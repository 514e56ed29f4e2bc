"""What lm-evaluation-harness is answered, on models small enough to compute by hand; it need not be installed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import models

from data_pipeline.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from tests.support.runs import tiny_config
from trainer.inference.lm_eval import HarnessModel
from trainer.inference.text_model import TextModel
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model

CONFIG = tiny_config(Path("data"), Path("run"))


class Request:
    """What the harness hands over."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def text_model(tokenizer: Tokenizer) -> TextModel:
    return TextModel(build_model(CONFIG.model, tokenizer.vocab_size, 0).eval(), tokenizer, CONFIG.model.context)


def merging_tokenizer() -> HuggingFaceTokenizer:
    """hello is one piece, and hel and lo are two."""
    pieces = ["<pad>", *"helo", "he", "hel", "lo", "hello"]
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo")]
    library = tokenizers.Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    return HuggingFaceTokenizer(library.to_str().encode(), {"pad": "<pad>"})


def test_a_piece_that_joins_context_and_continuation_counts_to_the_continuation() -> None:
    tokenizer = merging_tokenizer()
    start, whole = tokenizer.encode_batch(["hel", "hello"])
    assert (len(start), len(whole)) == (1, 1)
    source = text_model(tokenizer)
    [(log_p, is_greedy)] = HarnessModel(source, CONFIG).loglikelihood([Request("hel", "lo")])
    tokens_1L = torch.tensor([[tokenizer.pad_id]])
    with torch.no_grad():
        logits_V = source.model(tokens_1L, make_layout(torch.zeros_like(tokens_1L), torch.zeros_like(tokens_1L)))[0, 0]
    assert log_p == pytest.approx(float(logits_V.log_softmax(0)[whole[0]]), rel=1e-5)
    assert is_greedy == (int(logits_V[: tokenizer.vocab_size].argmax()) == whole[0])
    assert -math.inf < log_p < 0


def test_samples_of_the_same_context_differ_in_every_batch() -> None:
    config = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"micro_batch_size": 2})})
    model = HarnessModel(text_model(ByteTokenizer()), config)
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 12}
    texts = model.generate_until([Request("the cat", settings) for _ in range(6)])
    assert len(set(texts)) == 6
