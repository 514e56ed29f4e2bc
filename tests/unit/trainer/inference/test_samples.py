from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from data_pipeline.tokenizer import ByteTokenizer
from tests.support.prepared import write_prepared
from tests.support.ranks import run_ranks
from tests.support.runs import tiny_config
from trainer.config import EvalConfig, ModelConfig
from trainer.distributed.group import Group
from trainer.inference.samples import prompts_of, sample_and_score, text_perplexity
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import Continuation, TextModel
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model
from trainer.model.forward import LossModule
from trainer.parallel.fsdp import gathered, shard

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = ByteTokenizer()
CONFIG = tiny_config(Path("data"), Path("run"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    data = write_prepared(tmp_path_factory.mktemp("data"))
    return Rows(data, read_manifest(data), "val")


def source(**shape: Any) -> TextModel:
    model = ModelConfig(**({"layers": 1, "width": 32, "heads": 4, "context": 32, "init_std": 0.1} | shape))
    return TextModel(build_model(model, TOKENIZER.vocab_size, 0), TOKENIZER, model.context)


def continuation(prompt: str, text: str) -> Continuation:
    return Continuation(prompt, text, (), "length")


def test_prompts_that_are_given_are_used(rows: Rows) -> None:
    assert prompts_of(EvalConfig(prompts=("a", "b"), prompt="c"), rows, TOKENIZER) == ("a", "b")
    assert prompts_of(EvalConfig(sample_tokens=0, prompts=("a",)), rows, TOKENIZER) == ()


def test_without_prompts_they_are_the_beginnings_of_four_rows_spread_over_the_validation_set(rows: Rows) -> None:
    prompts = prompts_of(EvalConfig(), rows, TOKENIZER)
    assert prompts_of(EvalConfig(prompt="own"), rows, TOKENIZER) == ("own", *prompts)
    batch = rows.read(np.array([0, 2, 4, 6]))
    for prompt, tokens_L, segments_L in zip(prompts, batch.tokens_BL, batch.segments_BL, strict=True):
        first_document = TOKENIZER.decode(tokens_L[segments_L == 0].tolist())
        assert first_document.startswith(prompt)
        assert len(prompt) == min(16, len(first_document))


def test_perplexity_is_the_exponential_of_the_mean_loss_of_what_was_written() -> None:
    reference = source()
    model, written = reference.model, [continuation("ab", "cdé"), continuation("", "x"), continuation("y", "")]
    losses = []
    for prompt, text in (("ab", "cdé"), ("", "x")):
        tokens = torch.tensor([reference.prompt_tokens(prompt + text)])
        from_place = len(reference.prompt_tokens(prompt))
        with torch.no_grad():
            layout = make_layout(torch.zeros_like(tokens), torch.arange(tokens.shape[1])[None])
            logits = model(tokens, layout)[0].double().log_softmax(-1)
        losses += [-float(logits[place - 1, tokens[0, place]]) for place in range(from_place, tokens.shape[1])]
    assert len(losses) == 4 + 1
    assert text_perplexity(reference, CONFIG, written) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert text_perplexity(reference, CONFIG, [continuation("y", "")]) is None


def test_the_perplexity_of_a_broken_model_is_no_number() -> None:
    broken = source()
    with torch.no_grad():
        next(broken.model.parameters()).fill_(math.nan)
    value = text_perplexity(broken, CONFIG, [continuation("ab", "cd")])
    assert value is not None
    assert math.isnan(value)


def test_texts_longer_than_the_context_have_a_perplexity() -> None:
    value = text_perplexity(source(), CONFIG, [continuation("a" * 40, "b" * 100)])
    assert value is not None
    assert 1 < value < 1000


def test_samples_are_scored_if_that_is_wanted() -> None:
    sampling = Sampling(8, temperature=1.0, seed=3)
    written, scores = sample_and_score(source(), ["a", "b"], sampling, CONFIG)
    assert [one.prompt for one in written] == ["a", "b"]
    assert scores is not None
    assert scores["num_texts"] == 2
    assert scores["perplexity"] == text_perplexity(source(), CONFIG, written)
    unscored = CONFIG.model_copy(update={"eval": EvalConfig(score=False)})
    assert sample_and_score(source(), ["a", "b"], sampling, unscored) == (written, None)


def test_ranks_that_share_the_weights_write_what_one_rank_writes() -> None:
    [first, second] = run_ranks(samples_of_a_sharded_model, 2)
    assert first == second
    assert first == samples(source(layers=2, kv_heads=2, context=16))


def samples(of: TextModel) -> tuple[list[str], float]:
    written, scores = sample_and_score(of, ["the", "a longer prompt"], Sampling(10, seed=5), CONFIG)
    assert scores is not None
    assert scores["perplexity"] is not None
    return [one.text for one in written], round(scores["perplexity"], 3)


def samples_of_a_sharded_model(group: Group) -> tuple[list[str], float]:
    of = source(layers=2, kv_heads=2, context=16)
    sharded = shard(LossModule(of.model, CONFIG.loss), group)
    return gathered(sharded, lambda: samples(of))
