"""The speed of generating with a key-value cache, 6 layers of width 384 with random weights, in fp32, one thread.

    python -m tests.benchmarks.generation BATCH TOKENS

prints the sample of this project. Both contestants draw at temperature 0.8 after prompts of 16 tokens, and no text ends early.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.benchmarks.bench import PEERS_COMMAND, Bench
from tests.benchmarks.harness import OWN, PEERS, Comparison, Contestant, Sample, run_program
from tests.benchmarks.steps import SMALL, VOCAB, num_threads
from trainer.inference.sampling import Sampling
from trainer.inference.text_model import TokenRows
from trainer.model.decoder import build_model

PROMPT_TOKENS, TRANSFORMERS = 16, "transformers, Qwen3"


def comparisons(bench: Bench) -> Iterator[Comparison]:
    num_tokens = SMALL.context - PROMPT_TOKENS
    models = bench.peer("models", "transformers")
    for batch in (1, 8):
        contestants: dict[str, Contestant] = {OWN: partial(own, batch, num_tokens)}
        peer = partial(transformers, models, batch, num_tokens) if models else PEERS_COMMAND
        contestants[TRANSFORMERS] = peer
        yield Comparison(
            f"generation-{batch}",
            f"Generation with a cache, batch {batch}, 6 layers of width 384, one thread",
            "tokens/s",
            contestants,
            TRANSFORMERS,
            goal="faster than transformers",
            rounds=1 if bench.quick else 5,
            higher_is_better=True,
        )


def own(batch: int, num_tokens: int, _: Path) -> Sample:
    return run_program("tests.benchmarks.generation", batch, num_tokens, env=num_threads(1)).reported()


def transformers(python: Path, batch: int, num_tokens: int, _: Path) -> Sample:
    shape = {"layers": SMALL.layers, "width": SMALL.width, "heads": SMALL.heads, "mlp_width": SMALL.mlp_size}
    shape |= {"vocab": SMALL.padded_vocab(VOCAB), "length": SMALL.context}
    words = (batch, PROMPT_TOKENS, num_tokens, json.dumps(shape))
    return run_program(PEERS / "transformers_generation.py", *words, python=python, env=num_threads(1)).reported()


def generate(batch: int, num_tokens: int) -> dict[str, object]:
    """Return a sample of this process: tokens per second, and the CPU time in seconds."""
    torch.set_num_threads(1)
    model = build_model(SMALL, VOCAB, seed=0).eval()
    prompts = torch.randint(VOCAB, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    for length in (8, num_tokens):  # the first is not measured
        rows = TokenRows(model, prompts, VOCAB, Sampling(length, temperature=0.8, seed=1), SMALL.context)
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(length):
            rows.step()
    taken = time.perf_counter() - begun
    facts = {"tokens": num_tokens * batch}
    return {"value": num_tokens * batch / taken, "cpu": time.process_time() - cpu, "facts": facts}


if __name__ == "__main__":
    print(json.dumps(generate(int(sys.argv[1]), int(sys.argv[2]))))
