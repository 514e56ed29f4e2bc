"""Prints the number of ranks for the GPUs of this machine: one for each GPU that torch sees, 0 if there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from common.command_line import importing, run_command
from trainer.launch.notices import say
from trainer.launch.train_settings import load_train_settings


def main(arguments: Sequence[str]) -> None:
    """Print how many GPUs a training with these arguments uses on this machine; the launcher starts one rank for each."""
    device = load_train_settings(arguments).device
    say("counting the GPUs; loading PyTorch for it takes seconds to a minute")
    with importing():
        devices = import_module("trainer.distributed.devices")  # loads torch
    sys.stdout.write(f"{devices.num_gpus(device)}\n")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
