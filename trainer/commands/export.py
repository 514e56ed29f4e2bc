"""`export`: writes the model of a checkpoint for other programs."""

from __future__ import annotations

from common.errors import ConfigError
from trainer.commands.options.export import ExportOptions
from trainer.exchange.export import check_output, write_export
from trainer.exchange.source import open_source
from trainer.extensions.trust import run_extension
from trainer.finetuning.choice import saved_objective
from trainer.run.directory import load_config
from trainer.run.record import read_record

__all__ = ["run"]


def run(options: ExportOptions) -> None:
    """Write the directory and print its path.

    Raises:
        CheckpointError: the run or the checkpoint does not exist or is damaged.
        ConfigError: the model is not the built-in decoder, a setting or the tokenizer has no equivalent, code of the run needs
            consent, or the directory has other files.
    """
    check_output(options.output, replace=options.replace)
    _check_model(options)
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


def _check_model(options: ExportOptions) -> None:
    """Refuse a model that is not the built-in decoder."""
    run, config = options.run, load_config(options.run)
    extension = run_extension(run, read_record(run)["identity"].get("extension"), trust_code=options.trust_code)
    if extension.build_model is not None:
        raise ConfigError(
            f"{run}: its extension defines build_model, and other programs cannot execute it; export a run whose extension has no "
            "build_model"
        )
    objective = saved_objective(run, config)
    if objective.model is not None or not objective.writes:
        raise ConfigError(
            f"{run}: with objective = {config.objective} the model is not the built-in decoder, and --format {options.format} can "
            "express no other; export a run with objective = language"
        )
