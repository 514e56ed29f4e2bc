"""Starts training runs for tests, in this process or as torchrun would start them, and reads their output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]


def tiny_config(data: Path, run: Path, /, **changes: Any) -> TrainConfig:
    """Return a configuration with two narrow layers, rows of 32 tokens and 12 steps of 8 rows, which trains in about a second.

    `changes` override single keys of a section.
    """
    settings: dict[str, Any] = {
        "data": data,
        "run": run,
        "threads": 1,
        "device": "cpu",
        "precision": "fp32",
        "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 32},
        "batch": {"global_batch_size": 8, "micro_batch_size": 2},
        "optim": {"lr": 3e-3},
        "schedule": {"warmup_steps": 3, "decay_steps": 12},
        "limits": {"steps": 12},
        "eval": {"every_steps": 4, "sample_tokens": 4},
        "checkpoint": {"every_steps": 5},
        "log": {"report": False, "hardware_every_s": 0},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    return TrainConfig(**settings)


def arguments(config: TrainConfig) -> list[str]:
    """Return the command line that sets this configuration."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    given = {name: value if isinstance(value, list) else [value] for name, value in flat.items() if value not in (None, [], {}, "")}
    return [
        word
        for name, values in given.items()
        for word in (f"--{name}", *(str(value).lower() if isinstance(value, bool) else str(value) for value in values))
    ]


def start_ranks(config: TrainConfig, num_ranks: int, **environment: str) -> subprocess.Popen[str]:
    """Start `train` under torchrun. The output goes to `<run>.log` next to the run."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", "--"),
        *("trainer", "train", *arguments(config)),
    ]
    with config.run.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )


def run_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m <words>` to its end, with its output captured."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300, env=os.environ | environment)


def metrics(run: Path, *events: str) -> list[dict[str, Any]]:
    """Return the events of these kinds in the metrics of a run, in the order of the file."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [parsed for line in lines if (parsed := json.loads(line))["event"] in events]


def losses(run: Path) -> list[tuple[int, str]]:
    """Return step and exact loss (in hexadecimal) of every training step."""
    return [(event["step"], event["loss_hex"]) for event in metrics(run, "train")]


def wait_for_step(run: Path, step: int, timeout_s: float = 120) -> None:
    """Wait until the metrics of a run have reached a step."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and any(f'"event": "train", "step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{run} did not reach step {step} in {timeout_s} s; see {run.with_suffix('.log')}")
