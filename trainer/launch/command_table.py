"""The commands of the trainer, a row each. The launcher reads the table too, so it must load quickly."""

from __future__ import annotations

from common.command_line import Command


def _row(name: str, summary: str, *, module: str = "", is_frequent: bool = False) -> Command:
    return Command(name, summary, f"trainer.commands.{module or name}", is_frequent)


_ROWS = (
    _row("train", "train a model, or continue a run that was stopped", is_frequent=True),
    _row("plan", "show the length, memory, disk space and time of a training", is_frequent=True),
    _row("evaluate", "compute validation loss and other measures of a checkpoint", is_frequent=True),
    _row("generate", "write text with the model of a checkpoint", is_frequent=True),
    _row(
        "report",
        "write report.html and training_metrics.png: curves, evaluations, samples, settings, digests",
        is_frequent=True,
    ),
    _row("compare", "write one page that compares several runs", is_frequent=True),
    _row("runs", "list the runs in a folder: state, steps, validation loss", is_frequent=True),
    _row(
        "verify",
        "check that a run's files are intact, that the environment is the same, and that steps give the same bits again",
        is_frequent=True,
    ),
    _row("audit", "prove that no row was trained twice or left out, or show the text of one step", is_frequent=True),
    _row("classify", "print the label of each text, with a classification model"),
    _row("compress", "write a smaller copy of a model: int8, int4 or pruned"),
    _row("export", "write a model for transformers, vLLM, llama.cpp or ONNX"),
    _row("tune", "search for the settings with the lowest validation loss"),
    _row("import", "make a run of a Qwen3 or Llama model of Hugging Face", module="import_model"),
    _row("doctor", "check GPUs, driver, disks, network and versions of this machine"),
    _row("stacks", "print the stacks of all threads of a running training"),
    _row("schema", "print the JSON Schema of the settings of `train`; --env prints their environment variables"),
)
COMMANDS = {command.name: command for command in _ROWS}  # by name, in the order of the help
