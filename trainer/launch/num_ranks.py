"""Prints the number of ranks for the GPUs of this machine: one for each GPU that torch sees, 0 if there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from common.command_line import run_command
from common.settings.load import load_settings
from common.settings.options import help_parser
from trainer.config import TrainConfig
from trainer.distributed.devices import num_gpus


def main(arguments: Sequence[str]) -> None:
    """Print how many GPUs a training with these arguments uses on this machine; the launcher starts one rank for each."""
    parser = help_parser(TrainConfig, "python -m trainer train", "Prints the number of GPUs that a training uses.")
    sys.stdout.write(f"{num_gpus(load_settings(TrainConfig, arguments, parser).device)}\n")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
