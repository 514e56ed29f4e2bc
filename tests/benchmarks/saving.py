"""How long a save keeps training waiting: weights and the two moments of AdamW in fp32, while training continues.

The stall is the time that the loop does not train. The first save of a process is left out, because it allocates buffers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from tests.benchmarks.bench import QUIET, Bench, flags
from tests.benchmarks.harness import OWN, PEERS, Comparison, Contestant, ContestantError, Sample, Watched, run_program
from tests.support.runs import metrics
from trainer.config import ModelConfig

VOCAB = 4096
MODELS = {
    "30M": (ModelConfig(layers=9, width=512, heads=8, context=256), VOCAB),
    "124M": (ModelConfig(layers=12, width=768, heads=12, context=256), 50_304),
}
ASYNC = "torch.distributed.checkpoint.async_save"
EVERY = 6
"""Steps between two saves. A save in the background must end before the next one begins."""
NUM_SAVES = 4


def comparisons(bench: Bench) -> Iterator[Comparison]:
    for size, (model, rows) in MODELS.items():
        if bench.quick and size == "124M":
            continue
        contestants: dict[str, Contestant] = {OWN: partial(own, bench, model, rows)}
        for name, way in (("torch.save", "save"), (ASYNC, "async_save")):
            contestants[name] = partial(torch_save, bench, model, rows, way)
        title = f"The stall of a save, {size} weights with AdamW"
        goal = "as short as async_save's"
        yield Comparison(f"save-{size.lower()}", title, "s", contestants, ASYNC, goal=goal, rounds=1 if bench.quick else 5)


def own(bench: Bench, model: ModelConfig, vocab_rows: int, folder: Path) -> Sample:
    steps = EVERY * NUM_SAVES
    shape = {"model.layers": model.layers, "model.width": model.width, "model.heads": model.heads, "model.context": model.context}
    settings = QUIET | shape | {"model.vocab_rows": vocab_rows, "data": bench.demo_rows, "threads": 2, "precision": "fp32"}
    settings |= {"batch.global_batch_size": 1, "batch.micro_batch_size": 1, "schedule.warmup_steps": 1, "limits.steps": steps}
    settings |= {"checkpoint.every_steps": EVERY}
    watched = run_program("trainer", "train", *flags({"run": folder / "run"} | settings))
    stalls = [event["stall_s"] for event in metrics(folder / "run", "save")]
    saved = folder / "run" / "checkpoints"
    return sample(stalls, watched, saved, len([*saved.glob("step-*")]))


def torch_save(bench: Bench, model: ModelConfig, vocab_rows: int, way: str, folder: Path) -> Sample:
    settings = bench.settings(model, vocab_rows, micro=1, steps=EVERY * NUM_SAVES, threads=2)
    path = folder / "settings.json"
    path.write_text(json.dumps(asdict(settings)))
    watched = run_program(PEERS / "torch_saving.py", path, way, EVERY, folder / "saved")
    return sample(json.loads(watched.lines[-1]), watched, folder / "saved", NUM_SAVES)


def sample(stalls: list[float], watched: Watched, saved: Path, kept: int) -> Sample:
    if len(stalls) != NUM_SAVES:
        raise ContestantError(f"{len(stalls)} saves instead of {NUM_SAVES}")
    num_bytes = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    facts = {"saves": len(stalls), "MB": round(num_bytes / 1e6 / kept), "first": f"{stalls[0]:.2f} s"}
    return Sample(median(stalls[1:]), None, watched.load, facts)
