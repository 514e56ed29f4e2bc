from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from trainer.commands.run_options import CheckpointOptions
from trainer.interop import Dtype, FormatName


class ExportOptions(CheckpointOptions):
    """Writes the model of a checkpoint as a directory that other programs read.

    The averaged weights are written if there are any.
    """

    format: FormatName = Field(
        "hf",
        description="Format of the files. hf: Hugging Face, for transformers, vLLM and llama.cpp; onnx: graphs for ONNX Runtime; "
        "peft: the adapters alone, for PEFT and vLLM.",
    )
    output: Annotated[Path, Place(metavar="DIR", target="folder")] = Field(
        description="New or empty directory that receives the files."
    )
    dtype: Dtype = Field("fp32", description="Type of the weights. bf16 rounds them and halves the size.")
    replace: bool = Field(False, description="Replace an earlier export in the directory. Other files are never replaced.")
    inexact_tokenizer: bool = Field(
        False, description="Export the tokenizer even if its export gives other ids for some texts, as with kind unigram."
    )


def run(options: ExportOptions) -> None:
    export(options)
    print(options.output)


def export(options: ExportOptions) -> None:
    from trainer.commands.saved_model import check_is_decoder
    from trainer.interop.export import check_output, write_export
    from trainer.model.saved_decoder import open_decoder
    from trainer.runs.saved_run import SavedRun

    check_output(options.output, replace=options.replace)
    reason = f"--format {options.format} can express no other"
    saved = SavedRun(options.run)
    check_is_decoder(saved, reason, trust_code=options.trust_code)
    source = open_decoder(saved, options.checkpoint)
    write_export(
        source,
        options.output,
        kind=options.format,
        dtype=options.dtype,
        replace=options.replace,
        exact=not options.inexact_tokenizer,
    )
