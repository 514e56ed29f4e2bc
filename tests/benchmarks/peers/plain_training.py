"""A training loop in plain PyTorch, as small as nanoGPT's, with the decoder of this project: python plain_training.py SETTINGS.json

One stream of tokens, random crops, causal attention over a whole crop, cross-entropy over all logits, AdamW in one kernel.
"""

import json
import math
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from training_peer import Settings, crop, read_settings, stream


class Block(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.heads, self.head_width = s.heads, s.width // s.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(s.width, eps=1e-6), nn.RMSNorm(s.width, eps=1e-6)
        self.norm_q, self.norm_k = nn.RMSNorm(self.head_width, eps=1e-6), nn.RMSNorm(self.head_width, eps=1e-6)
        self.qkv, self.out = nn.Linear(s.width, 3 * s.width, bias=False), nn.Linear(s.width, s.width, bias=False)
        self.gate, self.up = (nn.Linear(s.width, s.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(s.mlp_width, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (self.heads, -1)) for part in self.qkv(self.norm_1(x)).chunk(3, dim=2))
        q, k = turn(self.norm_q(q).transpose(1, 2), cos, sin), turn(self.norm_k(k).transpose(1, 2), cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        z = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(z)) * self.up(z))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Model(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width, eps=1e-6)
        self.head = nn.Linear(s.width, s.vocab, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(
                    weight, std=0.02 / math.sqrt(2 * s.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                )
        angles = torch.arange(s.length)[:, None] * 10_000 ** -(torch.arange(0, s.width // s.heads, 2) / (s.width // s.heads))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def main() -> None:
    s = read_settings()
    tokens = stream(s)
    model = Model(s).to(s.device)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim == 2) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=True)
    if s.compiled:
        model.compile()
    seconds = []
    for number in range(s.steps):
        started = time.perf_counter()
        for _ in range(s.micro_batches):
            rows = torch.from_numpy(np.stack([crop(tokens, s.length + 1) for _ in range(s.micro)]))
            if s.device == "cuda":
                rows = rows.pin_memory().to(s.device, non_blocking=True)
            with torch.autocast(s.device, torch.bfloat16, enabled=s.bf16):
                loss = model(rows[:, :-1], rows[:, 1:]) / s.micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - started)
        print(f"step {number + 1}", flush=True)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
