"""Trains three recipes for 50 steps on the CPU and records every loss: `python -m tests.golden.training` rewrites training.json.

`--add RESULTS` instead adds the losses of a GPU from `results.json` of `make gpu`.

A change that is not meant to alter numbers must give the same losses to the last bit. The losses depend on the vendor, instruction
set and caches of the processor, because these select other kernels. The file holds the losses of each kind of processor. Only those
of this machine are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from common.settings.load import load_settings
from common.settings.options import help_parser
from tests.support.prepared import write_prepared
from tests.support.runs import ROOT, losses, metrics
from trainer.config import TrainConfig
from trainer.machine.determinism import cpu_kernels

LOSSES = Path(__file__).with_suffix(".json")
RECIPES = ("smoke", "demo", "shakespeare-char")
STEPS = 50
OVERRIDES = {"demo": ("--batch.global_batch_size", "4", "--batch.micro_batch_size", "2")}
"""Options that keep a recipe short enough for every run of the tests."""


def processor(device: str = "cpu") -> str:
    """Return the properties that select kernels and their blocks: the CPU or the model of the GPU, and the version of torch."""
    name = cpu_kernels() if device == "cpu" else torch.cuda.get_device_name()
    return f"{name} torch {torch.__version__.partition('+')[0]}"


def train_recipe(recipe: str, folder: Path, device: str = "cpu", timeout_s: float | None = None) -> dict[str, list[str]]:
    """Return every training loss and every validation loss as hexadecimal floats.

    Raises:
        TimeoutExpired: the training took longer than `timeout_s`, and was ended.
    """
    words = ["--recipe", recipe, "--data", str(folder / "data"), "--run", str(folder / "run"), "--limits.steps", str(STEPS)]
    config = load_settings(TrainConfig, words, help_parser(TrainConfig, "train", ""), {})
    write_prepared(folder / "data", row_length=config.model.context)
    words += [
        "--device",
        device,
        "--precision",
        "fp32",
        "--threads",
        "2",
        "--eval.every_steps",
        "25",
        "--eval.sample_tokens",
        "0",
        "--log.report",
        "false",
    ]
    words += ["--schedule.warmup_steps", "10", *OVERRIDES.get(recipe, ())]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAIN_")}
    command = [sys.executable, "-m", "trainer", "train", *words]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=timeout_s)
    run = folder / "run"
    return {"train": [loss for _, loss in losses(run)], "val": [event["val_loss_hex"] for event in metrics(run, "eval")]}


def main() -> None:
    """Replace the losses of this machine's kind of processor, or add those of a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, metavar="RESULTS", help="results.json of `make gpu`")
    options = parser.parse_args()
    known = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    if options.add:
        for item in json.loads(options.add.read_text())["items"].get("golden", {}).values():
            if "losses" in item:
                known.setdefault(item["device"], {})[item["recipe"]] = item["losses"]
    else:
        known[processor()] = {}
        for recipe in RECIPES:
            with tempfile.TemporaryDirectory() as temporary:
                known[processor()][recipe] = train_recipe(recipe, Path(temporary))
    LOSSES.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
