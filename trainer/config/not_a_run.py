"""The error message about a folder that was named as a run and is none."""

from __future__ import annotations

from pathlib import Path

from common.command_line import command_text

__all__ = ["not_a_run"]


def not_a_run(folder: Path, missing: str) -> str:
    """Return what is wrong with `folder` and what to do. `missing` is the file that each run has.

    A Hugging Face directory is a frequent mistake, because it holds a model too.
    """
    if (folder / "config.json").is_file():
        command = command_text("import", folder, "--output", "RUN")
        return f"{folder}: this is a Hugging Face directory, not a run; make a run of its model: {command}"
    return f"{folder}: no {missing}, so this is not a run; name a directory that `trainer train --run` wrote"
