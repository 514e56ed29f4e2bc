"""`export`: writes the model of a checkpoint for other programs."""

from __future__ import annotations

from trainer.commands.options.export import ExportOptions
from trainer.commands.saved_model import check_is_decoder
from trainer.interop.export import check_output, write_export
from trainer.interop.source import open_source
from trainer.runs.saved_run import load_config

__all__ = ["run"]


def run(options: ExportOptions) -> None:
    """Write the directory and print its path.

    Raises:
        CheckpointError: the run or the checkpoint does not exist or is damaged.
        ConfigError: the model is not the built-in decoder, a setting or the tokenizer has no equivalent, code of the run needs
            consent, or the directory has other files.
    """
    check_output(options.output, replace=options.replace)
    reason = f"--format {options.format} can express no other"
    check_is_decoder(options.run, load_config(options.run), reason, trust_code=options.trust_code)
    source = open_source(options.run, options.checkpoint)
    write_export(
        source,
        options.output,
        kind=options.format,
        dtype=options.dtype,
        replace=options.replace,
        exact=not options.inexact_tokenizer,
    )
    print(options.output)
