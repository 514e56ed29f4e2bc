"""Compares training with other tools: the same decoder, vocabulary, text, batch and cores; positions trained per second.

    python -m tests.benchmarks.training [--text TEXT] [--transformers PYTHON] [--rounds 5] [--only peers|levels]
    python -m tests.benchmarks.training --gpu --text TEXT

peers   this trainer with its defaults (with `--compiled` also compiled), a plain loop in PyTorch, and Hugging Face's Trainer with
        Qwen3 if `--transformers` names an interpreter with torch, transformers and accelerate
levels  the cost of `run` and `elastic` compared with `off`, on one rank, and on two gloo ranks with half of the threads each
--gpu   a model of GPT-2's size in bf16, compiled: positions per second, and the share of the peak rate of the GPU

The contestants take turns, each time in a new process, because the speed of a shared machine varies over time. The result is the
median over the rounds. The time of a contestant in a round is the median of its steps after the first ones.
Positions are all positions of a batch, including padding and last tokens, so packing has no advantage here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from data_pipeline.dataset.manifest import read_manifest
from data_pipeline.dataset.shards import Rows
from tests.benchmarks.peers.training_peer import Settings
from tests.support.runs import ROOT, metrics
from trainer.config import ModelConfig

PEERS = Path(__file__).parent / "peers"
SKIPPED_STEPS = 3
Contestant = Callable[[], list[float]]
"""Runs once in a separate process, and returns the seconds of its steps."""


@dataclass(frozen=True)
class Workload:
    """The settings that all contestants train with, and the folders of the files."""

    folder: Path
    data: Path
    settings: Settings

    @property
    def positions(self) -> int:
        """Positions per step."""
        return self.settings.length * self.settings.micro * self.settings.micro_batches


def run(command: list[str], threads: int) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": str(threads)}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def prepare(text: str, data: Path, vocab: int, row_length: int) -> None:
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--sources", text, "--output", str(data)]
    command += ["--row_length", str(row_length), "--tokenizer.kind", "bpe", "--tokenizer.vocab_size", str(vocab)]
    run(command, threads=1)


def write_stream(data: Path, path: Path) -> None:
    """Write the same tokens as one stream without padding, for contestants that read crops."""
    rows = Rows(data, read_manifest(data), "train")
    with path.open("wb") as file:
        for start in range(0, len(rows), 1024):
            batch = rows.read(np.arange(start, min(len(rows), start + 1024)))
            file.write(batch.tokens_BL[batch.segments_BL >= 0].astype(np.uint16).tobytes())


def trainer_steps(work: Workload, name: str, ranks: int = 1, *extra: str) -> list[float]:
    """Train with this trainer, and return the seconds of each step that it recorded."""
    s = work.settings
    with tempfile.TemporaryDirectory(dir=work.folder, prefix=name) as folder:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "--"] if ranks > 1 else []
        command = [sys.executable, "-m", *launcher, "trainer", "train", "--data", str(work.data), "--run", f"{folder}/run"]
        flags = {
            "device": "cpu",
            "threads": max(1, s.threads // ranks),
            "precision": "bf16" if s.bf16 else "fp32",
            "model.layers": s.layers,
            "model.width": s.width,
            "model.heads": s.heads,
            "model.context": s.length,
            "batch.global_batch_size": s.micro * s.micro_batches,
            "batch.micro_batch_size": s.micro,
            "limits.steps": s.steps,
            "schedule.warmup_steps": 1,
            "eval.max_rows": 1,
            "eval.every_steps": 1_000_000,
            "eval.sample_tokens": 0,
            "checkpoint.every_steps": 1_000_000,
        }
        run(
            [*command, *(word for key, value in flags.items() for word in (f"--{key}", str(value))), *extra],
            s.threads // ranks or 1,
        )
        return step_seconds(Path(folder, "run"))


def step_seconds(run_folder: Path) -> list[float]:
    return [(b["tokens"] - a["tokens"]) / b["tokens_per_s"] for a, b in pairwise(metrics(run_folder, "train"))]


def peer_steps(work: Workload, interpreter: str, peer: str) -> list[float]:
    settings = work.folder / "settings.json"
    settings.write_text(json.dumps(asdict(work.settings)))
    output = run([interpreter, str(PEERS / peer), str(settings)], work.settings.threads)
    return [float(value) for value in json.loads(output.splitlines()[-1])]


def compare(title: str, work: Workload, contestants: dict[str, Contestant], rounds: int) -> None:
    """Print one table: median, minimum and maximum over the rounds, and the ratio to the first contestant of the same round."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, contestant in contestants.items():
            rates[name].append(work.positions / float(np.median(contestant()[SKIPPED_STEPS:])))
            print(f"round {number + 1}, {name}: {rates[name][-1]:.0f} positions/s", file=sys.stderr)
    first = np.array(rates[next(iter(rates))])
    print(f"\n{title}\n\n| | positions/s, median | min | max | ratio to the first |\n|---|---|---|---|---|")
    for name, values in rates.items():
        ratio = float(np.median(np.array(values) / first))
        print(f"| {name} | {np.median(values):.0f} | {min(values):.0f} | {max(values):.0f} | {ratio:.2f} |")


def on_cpu(options: argparse.Namespace, folder: Path) -> None:
    prepare(options.text, folder / "data", options.vocab, options.length)
    write_stream(folder / "data", folder / "tokens.bin")
    model = ModelConfig(layers=options.layers, width=options.width, heads=options.heads)
    settings = Settings(
        tokens=str(folder / "tokens.bin"),
        layers=options.layers,
        width=options.width,
        heads=options.heads,
        mlp_width=model.mlp_size,
        vocab=model.padded_vocab(options.vocab),
        length=options.length,
        micro=options.micro,
        micro_batches=options.micro_batches,
        steps=options.steps,
        threads=options.threads,
        bf16=options.precision == "bf16",
    )
    work = Workload(folder, folder / "data", settings)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.rounds} rounds of {options.steps} steps; {settings}")
    if options.only in (None, "peers"):
        contestants: dict[str, Contestant] = {
            "this trainer": partial(trainer_steps, work, "default"),
            "plain loop": partial(peer_steps, work, sys.executable, "plain_training.py"),
        }
        if options.compiled:
            contestants["this trainer, compiled"] = partial(trainer_steps, work, "compiled", 1, "--compile", "on")
        if options.transformers:
            contestants["transformers Trainer"] = partial(peer_steps, work, options.transformers, "transformers_training.py")
        compare("peers", work, contestants, options.rounds)
    if options.only in (None, "levels"):
        for ranks in (1, 2):
            levels: dict[str, Contestant] = {
                level: partial(trainer_steps, work, level, ranks, "--reproducibility", level) for level in ("off", "run", "elastic")
            }
            compare(f"levels, {ranks} rank{'s' if ranks > 1 else ''}", work, levels, options.rounds)


def on_gpu(options: argparse.Namespace, folder: Path) -> None:
    if not torch.cuda.is_available():
        print("--gpu: skipped, because this machine has no CUDA device")
        return
    prepare(options.text, folder / "data", 50_304, 1024)
    command = [
        sys.executable,
        "-m",
        "trainer",
        "train",
        "--recipe",
        "gpt2-124m",
        "--data",
        f"{folder}/data",
        "--run",
        f"{folder}/run",
    ]
    command += ["--device", "cuda", "--compile", "on", "--limits.steps", str(options.steps), "--batch.global_batch_size", "128"]
    run([*command, "--batch.micro_batch_size", "32", "--eval.max_rows", "32", "--eval.sample_tokens", "0"], options.threads)
    seconds = float(np.median(step_seconds(folder / "run")[SKIPPED_STEPS:]))
    mfu = [event["mfu"] for event in metrics(folder / "run", "train")[SKIPPED_STEPS:] if event["mfu"] is not None]
    share = f"{np.median(mfu):.3f}" if mfu else "unknown"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n\n| | positions/s | MFU |\n|---|---|---|")
    print(f"| this trainer, 124M, bf16, compiled | {128 * 1024 / seconds:.0f} | {share} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="builtin", help="source of data_pipeline prepare [default: the built-in text]")
    parser.add_argument("--transformers", help="Python interpreter that has torch, transformers and accelerate")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="precision of all contestants")
    parser.add_argument("--compiled", action="store_true", help="add this trainer, compiled, as a contestant; needs a C++ compiler")
    parser.add_argument("--only", choices=("peers", "levels"))
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (on_gpu if options.gpu else on_cpu)(options, Path(folder))


if __name__ == "__main__":
    main()
