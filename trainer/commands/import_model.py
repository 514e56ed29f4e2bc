from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.command_line import command_text
from common.settings.model import Options, Place


class ImportOptions(Options):
    """Makes a run of a published model: a Hugging Face directory with a model and its tokenizer, or a model of the Hub."""

    directory: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(
        description="Directory with config.json, *.safetensors, and tokenizer.json or tokenizer.model; or a model of the "
        "Hugging Face Hub: ORGANISATION/NAME, or ORGANISATION/NAME@REVISION."
    )
    output: Annotated[Path, Place(metavar="RUN", target="folder")] = Field(
        description="Directory of the new run. It must not exist."
    )


def run(options: ImportOptions) -> None:
    from trainer.interop.import_model import import_model

    found, run_folder = import_model(options.directory, options.output), options.output
    framing = () if found.has_eos else ("--tokenizer.add_eos", "false")
    prepare = command_text("prepare", "--tokenizer.path", run_folder, *framing, "--sources", "TEXT", "--output", "DATA")
    template = "" if found.template_refused is None else f"chat template   left out: {found.template_refused}\n"
    if found.has_chat_template:
        template = f"talk to it      {command_text('generate', run_folder, '--interactive')}\n"
    print(
        f"imported {run_folder}: {found.model_type}, {found.num_weights / 1e6:.2f}M weights from {', '.join(found.types)}, "
        f"vocabulary {found.vocab_size}\n"
        f"weights {found.weights}\n"
        f"{template}"
        f"write text      {command_text('generate', run_folder, '--prompt', 'The ')}\n"
        f"prepare data    {prepare}\n"
        f"train it on     {command_text('train', '--init', run_folder, '--data', 'DATA', '--run', 'RUN', '--recipe', 'auto')}"
    )
