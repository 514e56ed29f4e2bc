"""Measures the speed of generating a thousand tokens with and without the key-value cache, on the model of `env/recipes/demo.toml`.

    python -m tests.benchmarks.generation [--run RUN] [--tokens 1000] [--rounds 3] [--batch 1] [--threads N]

Without `--run` the model has fresh weights, because the time does not depend on them. Variants and batch sizes take turns, because
the speed of a shared machine varies over time. The result is the best of the rounds. Texts are drawn at temperature 0.8 from
prompts of 16 tokens and end only at the limit, so both variants draw the same number of tokens.
"""

from __future__ import annotations

import argparse
import time
import tomllib
from pathlib import Path

import torch
from torch import nn

from tests.support.runs import ROOT
from trainer.commands.saved_model import opened_text_model
from trainer.config import ModelConfig
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TokenRows
from trainer.model.decoder import build_model
from trainer.runs.saved_run import SavedRun

PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="measure the latest checkpoint of this run")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, config, vocab_size = opened(options.run)
    shape = f"{config.layers} layers of width {config.width}, context {config.context}, vocabulary {vocab_size}"
    print(f"{shape}, {options.threads} threads")
    for batch in options.batch:
        seconds = [
            [seconds_of(model, config, vocab_size, batch, options.tokens, cache) for cache in (True, False)]
            for _ in range(options.rounds)
        ]
        cached, uncached = map(min, zip(*seconds, strict=True))
        rates = "  ".join(
            f"{name} {options.tokens * batch / best:7.0f} tokens/s" for name, best in (("cache", cached), ("none", uncached))
        )
        print(f"batch {batch}: {rates}  ratio {uncached / cached:.1f}", flush=True)


def opened(run: Path | None) -> tuple[nn.Module, ModelConfig, int]:
    if run is not None:
        with opened_text_model(run, "latest") as source:
            return source.model, SavedRun(run).config.model, source.tokenizer.vocab_size
    recipe = tomllib.loads((ROOT / "env" / "recipes" / "demo.toml").read_text())
    config, vocab_size = ModelConfig(**recipe["train"]["model"]), recipe["prepare"]["tokenizer"]["vocab_size"]
    return build_model(config, vocab_size, seed=0).eval(), config, vocab_size


def seconds_of(model: nn.Module, config: ModelConfig, vocab_size: int, batch: int, num_tokens: int, use_cache: bool) -> float:
    sampling = Sampling(num_tokens, temperature=0.8, seed=1)
    prompts = torch.randint(vocab_size, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    rows = TokenRows(model, prompts, vocab_size, sampling, config.context, use_cache=use_cache)
    begun = time.perf_counter()
    for _ in range(num_tokens):
        rows.step()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
