"""Compares this trainer with a plain loop on character-level Shakespeare, with nanoGPT's published CPU settings, the same cores and
the same text.

    python -m tests.benchmarks.shakespeare --text input.txt

The plain loop follows the description of nanoGPT: GPT-2's block without biases, learned positions, AdamW with PyTorch's CPU
default, random crops, 20 batches of each split every 250 steps. Both use 4 layers, 4 heads, width 128, context 64, batch 12, 2000
steps, the first 90 % of the text for training and the last 10 % for validation. Wall-clock times are those of whole processes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.runs import ROOT, metrics

LAYERS, HEADS, WIDTH, CONTEXT, BATCH = 4, 4, 128, 64, 12
PEAK_RATE, FLOOR_RATE, WARMUP = 1e-3, 1e-4, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.norm_1(x)).split(WIDTH, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(y)
        return x + self.contract(functional.gelu(self.expand(self.norm_2(x))))


class PlainGPT(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.tokens.weight = self.head.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("projection.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        logits = self.head(self.norm(self.blocks(hidden)))
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def plain_loop(text: str, steps: int) -> dict[str, float]:
    """Train the plain model. Return its loss on the whole validation text, and its median step time in milliseconds."""
    torch.manual_seed(1337)
    alphabet = sorted(set(text))
    ids = np.array([alphabet.index(character) for character in text], dtype=np.uint16)
    splits = {"train": ids[: int(0.9 * len(ids))], "val": ids[int(0.9 * len(ids)) :]}

    def crops(split: str) -> tuple[Tensor, Tensor]:
        data = splits[split]
        starts = torch.randint(len(data) - CONTEXT, (BATCH,)).tolist()
        x, y = (torch.stack([torch.from_numpy(data[i + d : i + d + CONTEXT].astype(np.int64)) for i in starts]) for d in (0, 1))
        return x, y

    @torch.no_grad()
    def estimate() -> float:
        model.eval()
        means = [float(torch.stack([model(*crops(split)) for _ in range(20)]).mean()) for split in ("train", "val")]
        model.train()
        return means[1]

    model = PlainGPT(len(alphabet))
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.99))
    durations, estimates = [], []
    for step in range(steps):
        if step % 250 == 0:
            estimates.append(estimate())
        started = time.perf_counter()
        progress = (step - WARMUP) / (steps - WARMUP)
        decayed = FLOOR_RATE + 0.5 * (1 + math.cos(math.pi * progress)) * (PEAK_RATE - FLOOR_RATE)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * (step + 1) / (WARMUP + 1) if step < WARMUP else decayed
        loss = model(*crops("train"))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        durations.append(time.perf_counter() - started)
    estimate()
    return {"median_step_ms": 1e3 * float(np.median(durations)), "val_loss": whole_loss(model, splits["val"])}


@torch.no_grad()
def whole_loss(model: PlainGPT, data: np.ndarray) -> float:
    """Return the mean loss over a whole text, in consecutive windows of the length of the context."""
    usable = (len(data) - 1) // CONTEXT * CONTEXT
    x, y = (torch.from_numpy(data[d : d + usable].astype(np.int64)).view(-1, CONTEXT) for d in (0, 1))
    return float(
        np.average(
            [float(model(a, b)) for a, b in zip(x.split(64), y.split(64), strict=True)], weights=[len(a) for a in x.split(64)]
        )
    )


def timed(*command: str) -> tuple[float, str]:
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, capture_output=True, text=True)
    return time.perf_counter() - started, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="path of tinyshakespeare, 1,115,394 characters")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--plain-only", action="store_true", help="run the plain loop in this process and print its figures as JSON"
    )
    options = parser.parse_args()
    if options.plain_only:
        print(json.dumps(plain_loop(options.text.read_text(), options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        prepare_s, _ = timed(*f"data_pipeline prepare --recipe shakespeare-char --sources {options.text} --output {data}".split())
        train = f"trainer train --recipe shakespeare-char --data {data} --run {run} --limits.steps {options.steps}"
        train_s, _ = timed(*train.split())
        plain_s, output = timed(*f"tests.benchmarks.shakespeare --text {options.text} --steps {options.steps} --plain-only".split())
        events = metrics(run, "train")
        step_ms = 1e3 * float(np.median([(b["tokens"] - a["tokens"]) / b["tokens_per_s"] for a, b in pairwise(events)]))
        plain = json.loads(output)
        print(
            f"{options.steps} steps, {torch.get_num_threads()} threads, torch {torch.__version__}; "
            f"preparing the text took {prepare_s:.1f} s\n"
        )
        print("| | validation loss | whole run, s | median step, ms |\n|---|---|---|---|")
        print(f"| this trainer | {metrics(run, 'eval')[-1]['val_loss']:.4f} | {train_s:.1f} | {step_ms:.1f} |")
        print(f"| plain loop | {plain['val_loss']:.4f} | {plain_s:.1f} | {plain['median_step_ms']:.1f} |")


if __name__ == "__main__":
    main()
