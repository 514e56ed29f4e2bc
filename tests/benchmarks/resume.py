"""Measures the cost of saving and the time of a resume after a kill: recipe `demo`, one rank, on a CPU.

    python -m tests.benchmarks.resume [--rounds 5]

stall        time that training waited for the one checkpoint of 100 steps, compared with the time of those steps
resume       from the start of the resuming process to the end of its first step, after a kill -9
positioning  from a new reader to its first global batch, at several positions of the order, with and without checking the digest of
             the shard
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from data_pipeline.dataset.manifest import Manifest, read_manifest
from data_pipeline.dataset.shards import Rows
from tests.support.runs import ROOT, metrics
from trainer.config import BatchConfig
from trainer.data.loader import prefetched_batches
from trainer.data.mixture import build_order
from trainer.distributed.group import Group

EVERY = 100


def train_until(data: Path, run: Path, step: int) -> float:
    """Start or resume the run, and kill it after the step. Return the seconds from the start to its first step."""
    command = [sys.executable, "-m", "trainer", "train", "--recipe", "demo", "--data", str(data), "--run", str(run)]
    command += ["--checkpoint.every_steps", str(EVERY), "--limits.steps", "1000", "--device", "cpu"]
    before, first_s, begun = last_step(run), None, time.monotonic()
    saved = before // EVERY * EVERY
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (last := last_step(run)) < step:
            if first_s is None and saved < last != before:  # a start first removes the lines after the checkpoint
                first_s = time.monotonic() - begun
            time.sleep(0.02)
        assert process.poll() is None, "the run ended before it was killed"
        os.kill(process.pid, signal.SIGKILL)
    assert first_s is not None
    return first_s


def last_step(run: Path) -> int:
    try:
        return int(metrics(run, "train")[-1]["step"])
    except (OSError, IndexError, ValueError):
        return 0


def stall_share(run: Path) -> tuple[float, float]:
    """Return the seconds that the first checkpoint stalled the training, and the seconds of the steps up to it."""
    steps = metrics(run, "train")[:EVERY]
    seconds = [(b["tokens"] - a["tokens"]) / b["tokens_per_s"] for a, b in pairwise(steps)]
    (stall_s,) = [event["stall_s"] for event in metrics(run, "save") if event["step"] == EVERY]
    return stall_s, float(np.median(seconds)) * EVERY


def positioning_s(data: Path, manifest: Manifest, position: int, *, verify: bool) -> float:
    batch = BatchConfig(global_batch_size=16, micro_batch_size=8)
    begun = time.perf_counter()
    rows = Rows(data, manifest, "train", verify=verify)
    order = build_order(1337, rows, manifest.sources, {})
    with prefetched_batches(rows, batch, Group(0, 1, 0, torch.device("cpu")), order, position, 1) as batches:
        next(batches)
        return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        prepare = [sys.executable, "-m", "data_pipeline", "prepare", "--recipe", "demo", "--output", str(data)]
        subprocess.run(prepare, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        manifest = read_manifest(data)
        stalls, resumes = [], []
        for number in range(rounds):
            run = Path(folder, f"run-{number}")
            train_until(data, run, EVERY + 5)
            stalls.append(stall_share(run))
            resumes.append(train_until(data, run, EVERY + 8))
        shares = [stall_s / steps_s for stall_s, steps_s in stalls]
        print(f"stall: {np.median(shares):.2%} (max {max(shares):.2%}) of the time of {EVERY} steps", end=", ")
        print(f"{1e3 * np.median([stall_s for stall_s, _ in stalls]):.1f} ms")
        print(f"resume: {np.median(resumes):.1f} s (max {max(resumes):.1f} s)")
        for verify in (False, True):
            for position in (0, 10**6, 10**9, 10**12):
                taken = [1e3 * positioning_s(data, manifest, position, verify=verify) for _ in range(20)]
                print(f"positioning at {position}, digest {'checked' if verify else 'not checked'}: ", end="")
                print(f"{np.median(taken):.1f} ms (max {max(taken):.1f} ms)")


if __name__ == "__main__":
    main()
