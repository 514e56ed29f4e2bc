"""The time of a training step, at equal numbers of weights, batch and precision.

shakespeare-…   nanoGPT's settings for Shakespeare on a CPU (4 layers, width 128, context 64, batch 12), quiet and beside busy loops
small-model     6 layers, width 384, context 256, batch 8, a vocabulary of 4,096
levels          the levels of reproducibility, at the same size
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.benchmarks.bench import NANOGPT, PEERS_COMMAND, QUIET, Bench, write_characters
from tests.benchmarks.harness import OWN, Comparison, Contestant, Sample, step_sample
from trainer.config import ModelConfig

SHAKESPEARE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "batch_size": 12}
OWN_SHAKESPEARE: dict[str, object] = {"recipe": "shakespeare-char", "model.kv_heads": 4, "model.mlp_width": 344}
"""As many weights as nanoGPT's model has."""
GPT2: dict[str, object] = {"model.block": "gpt2", "model.mlp_width": 512} if "block" in ModelConfig.model_fields else {}
"""The same layers as nanoGPT's."""
SMALL = ModelConfig(layers=6, width=384, heads=6, context=256)
BATCH, VOCAB = 8, 4096
OWN_SMALL = {
    "model.layers": SMALL.layers,
    "model.width": SMALL.width,
    "model.heads": SMALL.heads,
    "model.context": SMALL.context,
    "batch.global_batch_size": BATCH,
    "batch.micro_batch_size": BATCH,
    "schedule.warmup_steps": 1,
}
SKIPPED = {"shakespeare": 20, "small": 3}
LIMIT_S = 40.0
"""A contestant that needs longer is ended, and the steps until then count."""


def comparisons(bench: Bench) -> Iterator[Comparison]:
    for threads, loops in ((1, 0), (2, 0), (1, 2), (2, 2)):
        if bench.quick and (threads, loops) == (1, 2):
            continue
        yield Comparison(
            f"shakespeare-{threads}-threads{'-busy' if loops else ''}",
            f"A step at nanoGPT's Shakespeare settings, {threads} thread{'s' * (threads > 1)}{', busy machine' if loops else ''}",
            "ms per step",
            shakespeare(bench, threads, 60 if bench.quick else 240),
            "nanoGPT",
            goal="1.0 times as fast as nanoGPT, 1.2 times with GPT-2's block",
            rounds=5 if not bench.quick else 1 if loops else 2,
            busy_loops=loops,
        )
    yield Comparison(
        "small-model",
        "A step of 6 layers of width 384, two threads",
        "ms per step",
        small_model(bench, 8 if bench.quick else 30),
        "nanoGPT",
        goal="1.3 times as fast as nanoGPT and transformers",
        rounds=1 if bench.quick else 5,
    )
    if not bench.quick:
        yield Comparison(
            "levels", "The levels of reproducibility, two threads", "ms per step", levels(bench, 30), "this project, off", rounds=3
        )


def shakespeare(bench: Bench, threads: int, steps: int) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {OWN: partial(own_shakespeare, bench, threads, steps, OWN_SHAKESPEARE)}
    if GPT2:
        found[f"{OWN}, GPT-2's block"] = partial(own_shakespeare, bench, threads, steps, OWN_SHAKESPEARE | GPT2)
    for name, same in (("nanoGPT", False), ("nanoGPT, our allocator and waiting", True)):
        found[name] = partial(nanogpt_shakespeare, bench, threads, steps, same) if bench.nanogpt else NANOGPT
    return found


def own_shakespeare(bench: Bench, threads: int, steps: int, shape: dict[str, object], folder: Path) -> Sample:
    settings = QUIET | {"data": bench.character_rows, "threads": threads, "precision": "fp32", "limits.steps": steps}
    watched = bench.train(folder / "run", settings | shape, env=num_threads(threads), limit_s=LIMIT_S)
    return step_sample(watched, SKIPPED["shakespeare"], weights=own_weights(watched.lines))


def nanogpt_shakespeare(bench: Bench, threads: int, steps: int, same_settings: bool, folder: Path) -> Sample:
    stream, vocab = write_characters(bench.characters, folder)
    options = SHAKESPEARE | {"max_iters": steps - 1, "eval_interval": 1_000_000, "eval_iters": 1, "learning_rate": 1e-3}
    watched = bench.train_nanogpt(
        folder, stream, vocab, options, same_settings=same_settings, env=num_threads(threads), limit_s=LIMIT_S
    )
    return step_sample(watched, SKIPPED["shakespeare"], weights=nanogpt_weights(watched.lines))


def small_model(bench: Bench, steps: int) -> dict[str, Contestant]:
    found: dict[str, Contestant] = {
        OWN: partial(own_small, bench, steps, {}),
        f"{OWN}, precision = auto": partial(own_small, bench, steps, {"precision": "auto"}),
    }
    models = bench.peer("models", "transformers")
    for note, same in (("", False), (", our allocator and waiting", True)):
        found[f"nanoGPT{note}"] = partial(nanogpt_small, bench, steps, same) if bench.nanogpt else NANOGPT
        peer = partial(transformers_small, bench, models, steps, same) if models else PEERS_COMMAND
        found[f"transformers, Qwen3{note}"] = peer
    return found


def levels(bench: Bench, steps: int) -> dict[str, Contestant]:
    return {f"{OWN}, {level}": partial(own_small, bench, steps, {"reproducibility": level}) for level in ("run", "off", "elastic")}


def own_small(bench: Bench, steps: int, more: dict[str, object], folder: Path) -> Sample:
    settings = QUIET | {"data": bench.demo_rows, "threads": 2, "precision": "fp32", "limits.steps": steps} | OWN_SMALL | more
    watched = bench.train(folder / "run", settings, env=num_threads(2))
    return step_sample(watched, SKIPPED["small"], weights=own_weights(watched.lines))


def nanogpt_small(bench: Bench, steps: int, same_settings: bool, folder: Path) -> Sample:
    stream = {"train": bench.demo_stream, "val": bench.demo_stream}
    options = {"n_layer": SMALL.layers, "n_head": SMALL.heads, "n_embd": SMALL.width, "block_size": SMALL.context}
    options |= {"batch_size": BATCH, "max_iters": steps - 1, "eval_interval": 1_000_000, "eval_iters": 1}
    watched = bench.train_nanogpt(folder, stream, VOCAB, options, same_settings=same_settings, env=num_threads(2))
    return step_sample(watched, SKIPPED["small"], weights=nanogpt_weights(watched.lines))


def transformers_small(bench: Bench, python: Path, steps: int, same_settings: bool, folder: Path) -> Sample:
    settings = bench.settings(SMALL, VOCAB, micro=BATCH, steps=steps, threads=2)
    watched = bench.train_peer(
        "transformers_training.py", python, settings, folder, same_settings=same_settings, env=num_threads(2)
    )
    return step_sample(watched, SKIPPED["small"])


def num_threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number)}


def own_weights(lines: tuple[str, ...]) -> str:
    """Return the number of weights that this project printed."""
    (line,) = [line for line in lines if line.startswith("training in ")]
    return line.split("  ", 1)[1].split(" weights", 1)[0]


def nanogpt_weights(lines: tuple[str, ...]) -> str:
    (line,) = [line for line in lines if line.startswith("number of parameters: ")]
    return line.removeprefix("number of parameters: ")
