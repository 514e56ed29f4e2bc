"""Finds the best learning rate of AdamW and Muon at several widths, by the validation loss after a short training on a CPU.

    python -m tests.benchmarks.optimizers [--widths 64 192] [--rates 1e-3 3e-3 1e-2 3e-2] [--steps 60]

Each cell is one run of the recipe `demo` on the built-in corpus, with 4 layers of that width, heads of width 16, 4 rows of 256
tokens per step, a warm-up of a tenth of the steps, and the same seed. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.runs import ROOT, metrics

KINDS = ("adamw", "muon")


def prepare(output: Path) -> None:
    command = [sys.executable, "-m", "data_pipeline", "prepare", "--recipe", "demo", "--output", str(output)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def last_loss(data: Path, run: Path, kind: str, width: int, rate: float, steps: int) -> float:
    """Train one run, and return its validation loss after the last step."""
    settings = {
        "model.width": width,
        "model.heads": width // 16,
        "optim.kind": kind,
        "optim.lr": rate,
        "optim.muon_lr": "none",  # both optimizers use the rate of the cell
        "batch.global_batch_size": 4,
        "batch.micro_batch_size": 4,
        "schedule.warmup_steps": max(1, steps // 10),
        "limits.steps": steps,
        "eval.every_steps": steps,
        "eval.max_rows": 64,
        "eval.sample_tokens": 0,
        "watchdog.enabled": "off",
        "threads": 1,
        "log.report": "false",
        "checkpoint.every_steps": steps,
        "device": "cpu",
    }
    command = [sys.executable, "-m", "trainer", "train", "--recipe", "demo", "--data", str(data), "--run", str(run)]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return float(metrics(run, "eval")[-1]["val_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", type=Path, help="prepared data of the recipe demo [default: prepare it]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="optimizers-") as name:
        folder = Path(name)
        if options.data is None:
            prepare(folder / "data")
        data = options.data or folder / "data"
        print("| width | optimizer |", " | ".join(f"{rate:g}" for rate in options.rates), "|")
        print("|---|---|" + "---|" * len(options.rates))
        for width, kind in itertools.product(options.widths, KINDS):
            runs = {rate: folder / f"{kind}-{width}-{rate:g}" for rate in options.rates}
            losses = [last_loss(data, run, kind, width, rate, options.steps) for rate, run in runs.items()]
            cells = [f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses]
            print(f"| {width} | {kind} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
