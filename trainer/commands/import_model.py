"""`import`: makes a run of a published model."""

from __future__ import annotations

from pathlib import Path

from common.command_line import command_text
from trainer.commands.options.import_model import ImportOptions
from trainer.interop.import_model import Imported, import_model

__all__ = ["run"]


def run(options: ImportOptions) -> None:
    """Import the model, and print what it is and what can be done with it. Raises the errors of `import_model`."""
    found, run_folder = import_model(options.directory, options.output), options.output
    framing = [word for role in found.lacking for word in (f"--tokenizer.add_{role}", "false")]
    prepare = command_text("prepare", "--tokenizer.path", run_folder, *framing, "--sources", "TEXT", "--output", "DATA")
    print(
        f"imported {run_folder}: {found.model_type}, {found.num_weights / 1e6:.2f}M weights from {', '.join(found.types)}, "
        f"vocabulary {found.vocab_size}\n"
        f"weights {found.weights}\n"
        f"{_about_the_template(found, run_folder)}"
        f"write text      {command_text('generate', run_folder, '--prompt', 'The ')}\n"
        f"prepare data    {prepare}\n"
        f"train it on     {command_text('train', '--init', run_folder, '--data', 'DATA', '--run', 'RUN', '--recipe', 'auto')}"
    )


def _about_the_template(found: Imported, run_folder: Path) -> str:
    if found.has_chat_template:
        return f"talk to it      {command_text('generate', run_folder, '--interactive')}\n"
    return "" if found.template_refused is None else f"chat template   left out: {found.template_refused}\n"
