"""Compares the time of a step with adapters to that of full fine-tuning, on a CPU with one thread.

    python -m tests.benchmarks.adapters [--rank 8] [--rounds 9] [--layers 6] [--width 384] [--rows 4] [--length 256]

A step is the forward and backward pass over one micro-batch, clipping and AdamW. Rounds alternate between the kinds, so that a load
on the machine disturbs all of them alike. Prints the medians, the ratios to full fine-tuning, and the numbers of the weights as a
table in Markdown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from trainer.config import LoraConfig, LossConfig, ModelConfig, OptimConfig
from trainer.config.finetuning import PROJECTIONS
from trainer.model.attention import make_layout
from trainer.model.decoder import build_model, flops_per_token
from trainer.model.forward import LossModule
from trainer.model.lora import add_adapters
from trainer.optim.optimizers import build_optimizers, set_learning_rate, step_unless

VOCAB = 4096


def stepper(config: ModelConfig, lora: LoraConfig, rows: int, length: int) -> tuple[Callable[[], None], int]:
    """Return a function that makes one step, and the number of trained weights."""
    model = build_model(config, VOCAB, seed=0).train()
    add_adapters(model, lora, seed=0)
    loss, optimizers = LossModule(model, LossConfig()), build_optimizers(model, OptimConfig())
    set_learning_rate(optimizers, 1e-3)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    tokens_BL = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    layout = make_layout(torch.zeros(rows, length, dtype=torch.int32), torch.arange(length).expand(rows, length))

    def step() -> None:
        loss(tokens_BL, layout, tokens_BL.roll(-1, 1)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        step_unless(optimizers, torch.zeros(()))
        model.zero_grad(set_to_none=True)

    return step, sum(weight.numel() for weight in trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"rank": 8, "rounds": 9, "layers": 6, "width": 384, "rows": 4, "length": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig(layers=options.layers, width=options.width, heads=options.width // 64, context=options.length)
    kinds = {
        "all weights": LoraConfig(),
        f"adapters of all matrices, rank {options.rank}": LoraConfig(rank=options.rank),
        f"adapters of q_proj and v_proj, rank {options.rank}": LoraConfig(
            rank=options.rank, targets=(PROJECTIONS[0], PROJECTIONS[2])
        ),
    }
    steps = {name: stepper(config, lora, options.rows, options.length) for name, lora in kinds.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for step, _ in steps.values():
        step()
    for _ in range(options.rounds):
        for name, (step, _) in steps.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    whole, whole_flops = seconds["all weights"], flops_per_token(config, VOCAB, options.length)
    print("| trained | weights | median step, ms | time, median of ratios | operations |\n|---|---:|---:|---:|---:|")
    for name, lora in kinds.items():
        ratio = median(own / other for own, other in zip(seconds[name], whole, strict=True))
        flops = flops_per_token(config, VOCAB, options.length, lora) / whole_flops
        print(f"| {name} | {steps[name][1]:,} | {1000 * median(seconds[name]):.0f} | {ratio:.2f} | {flops:.2f} |")


if __name__ == "__main__":
    main()
