"""Writes an exported directory: complete or not at all, and never over files of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import CheckpointError, ConfigError
from common.targets import new_folder
from trainer.interop.adapters import write_adapters
from trainer.interop.export_record import EXPORT_RECORD, export_record, foreign_entries, read_export_record
from trainer.interop.hugging_face import INDEX, Dtype, described_files, write_hugging_face
from trainer.interop.onnx import check_installed, write_onnx
from trainer.interop.source import ExportSource
from trainer.model.decoder import Decoder
from trainer.model.parameters import parameters_by_name

__all__ = ["FORMATS", "check_output", "write_export", "write_graphs"]

_log = logging.getLogger(__name__)


def write_graphs(source: ExportSource, dtype: Dtype, folder: Path, exact: bool = True) -> None:
    """Write the graphs of ONNX, and the files that describe model and tokenizer, which are those of `hf`.

    Raises:
        ConfigError: `dtype` is not fp32, a package is missing, or a setting of the model or the tokenizer has no equivalent.
        ProjectError: ONNX Runtime gives other logits.
    """
    if dtype != "fp32":
        raise ConfigError(f"--format onnx writes fp32, and --dtype is {dtype}; leave --dtype out")
    check_installed()
    for name, content in described_files(source, dtype, exact=exact).items():
        if name != INDEX:
            (folder / name).write_bytes(content)
    model = Decoder(source.config.model, source.tokenizer.vocab_size)
    with torch.no_grad():
        for name, parameter in parameters_by_name(model).items():
            parameter.copy_(source.weights[name])
    found = write_onnx(model, source.tokenizer.vocab_size, folder)
    _log.info("%s: the logits of ONNX Runtime differ by at most %.2g", " and ".join(found.files), found.difference)


FORMATS: dict[str, Callable[[ExportSource, Dtype, Path, bool], None]] = {
    "hf": write_hugging_face,
    "onnx": write_graphs,
    "peft": write_adapters,
}
"""Writes all files of a format but `export.json` into an empty folder, from source, type of the weights, folder and whether the
tokenizer must be exact. The option `--format` has the names."""


def write_export(source: ExportSource, output: Path, *, kind: str, dtype: Dtype, replace: bool = False, exact: bool = True) -> None:
    """Write a directory complete or not at all: see `common.targets.new_folder`.

    Args:
        source: the checkpoint.
        output: the directory.
        kind: a name in `FORMATS`.
        dtype: type of the weights in the files.
        replace: whether an earlier export in `output` may be replaced.
        exact: refuse a tokenizer that would give other ids for some texts.

    Raises:
        ConfigError: the directory has other files, or the model cannot be expressed in the format.
        OSError: a file cannot be written.
    """
    with new_folder(output, replaces=True) as folder:
        FORMATS[kind](source, dtype, folder, exact)
        (folder / EXPORT_RECORD).write_bytes(export_record(source, folder, kind=kind, dtype=dtype, exact=exact))
        check_output(output, replace=replace)


def check_output(output: Path, *, replace: bool) -> None:
    """Check that the directory can be written: it does not exist, is empty, or has an earlier export that may be replaced.

    Raises:
        ConfigError: it has anything else.
    """
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise ConfigError(f"--output {output} is a {'link' if output.is_symlink() else 'file'}; name a new or empty directory")
    if not output.exists() or not any(output.iterdir()):
        return
    try:
        record = read_export_record(output)
    except CheckpointError:
        raise ConfigError(f"--output {output} is not empty and has no earlier export; name a new or empty directory") from None
    if foreign := foreign_entries(output, record):
        raise ConfigError(
            f"--output {output} has {foreign[0]!r}, which an export did not write, so it is not replaced; name another directory"
        )
    if not replace:
        raise ConfigError(f"--output {output} has an export of step {record['step']}; add --replace, or name another directory")
